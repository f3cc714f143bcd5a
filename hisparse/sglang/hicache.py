"""A backend for SGLang's hierarchical cache: prefixes in files that a manager assigns.

For servers without hisparse's attention: ``--hicache-storage-backend dynamic`` loads the class by
its name (docs/kvcm.md). Its pages are those of servers with hisparse, if ``model`` is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from torch import Tensor

from hisparse.cache.serializer import FORMAT_VERSION
from hisparse.errors import ConfigError
from hisparse.options import StorageOptions, from_options
from hisparse.sglang.features.storage.calls import StorageCounters, StorageHealth, Workers
from hisparse.storage import Namespace
from hisparse.storage.managed import ManagedStore

#: What SGLang itself reads of the flag.
_OF_SGLANG: Final = ("backend_name", "module_path", "class_name")
_FLAG: Final = "--hicache-storage-backend-extra-config"
#: Sizes of a page by the layout of host memory, in order, after that of K and V.
_SIZES: Final = {
    "layer_first": "LTHD",
    "page_first": "TLHD",
    "page_first_direct": "LTHD",
    "page_head": "HTLD",
}
#: Bytes of one call.
_CALL_BYTES: Final = 8 * 2**20


class HiCacheKVCM(HiCacheStorage):  # type: ignore[misc]
    """Finds, reads and writes pages of SGLang's host memory. A call that fails is a miss.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``. ``extra_config`` has the options
            ``manager``, ``manager_group``, ``size`` and ``timeout_s`` of hisparse's key
            ``storage``, and ``model``: what servers must have in common to share pages, such as a
            digest of the weights; a server with hisparse logs it. SGLang knows a name alone, which
            other weights may have.
        others: of SGLang, unused.

    Raises:
        ConfigError: an option is unknown, or SGLang's host memory has something else than K and V.
    """

    def __init__(self, storage_config: Any, others: Any = None) -> None:
        given = {k: v for k, v in storage_config.extra_config.items() if k not in _OF_SGLANG}
        self._config = storage_config
        if (model := given.pop("model", None)) is None:
            text = "what a server with hisparse logs, or another name of these weights alone"
            raise ConfigError(f"{_FLAG}: model is not set; expected {text}")
        self._model = str(model)
        if (manager := given.get("manager")) is None:
            raise ConfigError(f"{_FLAG}: manager is not set; expected HOST:PORT")
        options = from_options(StorageOptions, "storage", _FLAG, given)
        lent = options.lent_bytes // storage_config.tp_size
        self._store = ManagedStore(manager, options.manager_group, options.timeout_s, lent)
        self._health = StorageHealth(StorageCounters(), options.timeout_s)
        self._workers = Workers(options.threads, "hisparse-hicache")

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the shape of pages from SGLang's host pool."""
        super().register_mem_pool_host(mem_pool_host)
        pool, config = mem_pool_host, self._config
        is_latent = type(pool) is MLATokenToKVPoolHost
        if not (is_latent or type(pool) is MHATokenToKVPoolHost) or pool.layout not in _SIZES:
            got = f"{type(pool).__name__} in layout {pool.layout}"
            choices = ", ".join(_SIZES)
            raise ConfigError(f"hicache: got {got}, expected K and V or latents in: {choices}")
        heads, width = (1, pool.kv_cache_dim) if is_latent else (pool.head_num, pool.head_dim)
        sizes = {"L": pool.layer_num, "T": pool.page_size, "H": heads, "D": width}
        parts = 1 if is_latent else 2
        order = _SIZES[pool.layout]
        #: Of a page in SGLang's memory, and the order of its axes in a record: [L, parts, T, H, D].
        self._shape = (parts, *(sizes[axis] for axis in order))
        self._axes = [0 if axis == "P" else 1 + order.index(axis) for axis in "LPTHD"]
        model = self._model
        for name in ("pp", "attn_cp", "dcp"):
            if (size := getattr(config, f"{name}_size")) > 1:  # Other layers, or other tokens.
                model += f" {name} {getattr(config, f'{name}_rank')} of {size}"
        self._dtype = pool.dtype
        name = str(pool.dtype).removeprefix("torch.")
        self._namespace = Namespace(
            model=model,
            kv_dtype=f"{name} {[pool.layer_num, heads, width, 0 if is_latent else width]}",
            page_size=pool.page_size,
            rank=0 if is_latent else config.tp_rank,
            num_ranks=1 if is_latent else config.tp_size,
            page_bytes=torch.Size(self._shape).numel() * pool.dtype.itemsize,
            version=FORMAT_VERSION,
        )

    def on_host_pools_registered(self) -> None:
        """Refuse models with state beside K and V, which a page does not have.

        Raises:
            ConfigError: SGLang has such memory.
        """
        if others := [str(name) for name in self.registered_pools if name != PoolName.KV]:
            raise ConfigError(f"hicache: got memory for {others}, expected only K and V")

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Length of the longest prefix of ``keys`` that is stored."""
        return int(self._call(self._store.find, keys) or 0)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        """Read pages into ``target_locations``, flat, as SGLang's memory has them.

        Returns:
            Each target, or None if its page was not read.
        """
        found = list[Tensor | None]()
        for part in self._parts(len(keys)):
            names = keys[part]
            records = self._records(len(names))
            hits = self._call(self._store.get, names, records) or [None] * len(names)
            for hit, record, target in zip(hits, records, target_locations[part], strict=True):
                if hit:
                    self._in_memory(target).copy_(self._in_store(record))
                found.append(target if hit else None)
        return found

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages ``values``, flat, as SGLang's memory has them; whether all are stored."""
        return all(self._set(keys[part], values[part]) for part in self._parts(len(keys)))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """One page of :meth:`batch_get`."""
        return self.batch_get([key], [target_location])[0]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """One page of :meth:`batch_set`."""
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1

    def close(self) -> None:
        """Let go of the manager."""
        self._workers.close()
        self._store.close()

    def _set(self, keys: list[str], values: Sequence[Tensor]) -> bool:
        records = self._records(len(keys))
        for record, value in zip(records, values, strict=True):
            self._in_store(record).copy_(self._in_memory(value))
        return bool(self._call(self._store.put, keys, records))

    def _parts(self, count: int) -> Iterator[slice]:
        """Parts of ``count`` pages, one for each call."""
        most = max(1, _CALL_BYTES // self._namespace.page_bytes)
        return (slice(first, first + most) for first in range(0, count, most))

    def _records(self, count: int) -> Tensor:
        """``[count, page_bytes] uint8``, of one call: a late one may still use it."""
        return torch.empty(count, self._namespace.page_bytes, dtype=torch.uint8)

    def _in_memory(self, page: Tensor) -> Tensor:
        """A page of SGLang's memory, ``[L, parts, T, H, D]``."""
        return page.view(self._shape).permute(self._axes)

    def _in_store(self, record: Tensor) -> Tensor:
        """A record ``[page_bytes] uint8`` in the same axes."""
        return record.view(self._dtype).view([self._shape[axis] for axis in self._axes])

    def _call(self, method: Callable[..., Any], keys: list[str], *records: Tensor) -> Any:
        """What a method of the store returns; None: it failed, was late, or was not called."""
        if not self._health.is_usable(self._workers):
            return None
        task = partial(method, self._namespace, keys, *(list(x.numpy()) for x in records))
        return self._health.call(self._workers, task, sum(x.nbytes for x in records))
