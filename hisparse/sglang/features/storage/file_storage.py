"""The file store, as one of SGLang's ``HiCacheStorage`` backends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from hisparse.sglang.features.storage.page_storage import Keys
from hisparse.storage import FileStore, Namespace


class FileStorage(HiCacheStorage):  # type: ignore[misc]
    """Keeps records in a :class:`FileStore`. A key is "NAMESPACE-PAGE", both hexadecimal.

    SGLang makes it as a dynamic backend, and can inject failures and delays between it and its
    caller.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``; ``extra_config`` has ``path``,
            ``size_bytes``, ``policy`` and ``ttl_s`` of the store.
        options: unused; SGLang passes it.
    """

    def __init__(self, storage_config: Any, options: Any) -> None:
        given = storage_config.extra_config
        self.store = FileStore(
            given["path"], given["size_bytes"], policy=given["policy"], ttl_s=given["ttl_s"]
        )
        self._namespaces: dict[str, Namespace] = {}
        self._lock, self._damaged = threading.Lock(), 0

    def use(self, namespace: Namespace) -> None:
        """Take keys of ``namespace`` from now on too."""
        self._namespaces[namespace.key] = namespace

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Length of the longest prefix of ``keys``, of one namespace, that is stored."""
        return self.store.find(*self._split_all(keys)) if keys else 0

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        """Read records of one namespace into ``target_locations``, a tensor for each key.

        The tensors may be longer than the records.
        """
        namespace, pages = self._split_all(keys)
        buffers = [row.numpy().data[: namespace.page_bytes] for row in target_locations]
        found = self.store.get(namespace, pages, buffers)
        return [row if ok else None for row, ok in zip(target_locations, found, strict=True)]

    def take_damaged(self) -> int:
        """Records that were dropped because they are damaged, since the last call."""
        with self._lock:
            before, self._damaged = self._damaged, self.store.counters["damaged"]
            return self._damaged - before

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store ``values``, a record for each key; whether all of them are stored then."""
        return all([self._put(key, value) for key, value in zip(keys, values, strict=True)])

    def _put(self, key: str, record: Tensor) -> bool:
        namespace, page = self._split(key)
        # A page that is there already is not written.
        done = self.store.put(namespace, page, record.numpy().data[: namespace.page_bytes])
        return done or self.store.find(namespace, [page]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Read one record."""
        return self.batch_get([key], [target_location])[0]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store one record."""
        return self._put(key, value)

    def exists(self, key: str) -> bool:
        """Whether a record is stored."""
        return self.batch_exists([key]) == 1

    def batch_remove(self, keys: Sequence[str]) -> None:
        """Remove records of one namespace."""
        if keys:
            self.store.remove(*self._split_all(keys))

    def remove_unused(self, namespace: Namespace, unused_s: float) -> None:
        """Remove the records that nobody wrote or read for so many seconds."""
        self.store.remove(namespace, unused_s=unused_s)

    def clear(self) -> None:
        """Remove the pages of all namespaces in use."""
        for namespace in self._namespaces.values():
            self.store.remove(namespace)

    def close(self) -> None:
        """Write what was put to the disk, and let go of the files."""
        self.store.close()

    def _split_all(self, keys: Sequence[str]) -> tuple[Namespace, Sequence[str]]:
        """The namespace of keys, one or more of them, and their pages."""
        if isinstance(keys, Keys):
            return self._namespaces[keys.namespace], keys.pages
        return self._split(keys[0])[0], [self._split(key)[1] for key in keys]

    def _split(self, key: str) -> tuple[Namespace, str]:
        namespace, _, page = key.partition("-")
        return self._namespaces[namespace], page
