"""Contexts by prefix, in a store that SGLang servers may share."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.errors import CapacityError, ConfigError, shorten
from hisparse.model_config import text_config
from hisparse.storage import FileStore
from hisparse.storage.fingerprint import rope_types
from hisparse.transformers.attention import enable
from hisparse.transformers.build import read_config
from hisparse.transformers.fingerprint import UnchangedModel, model_fingerprint
from hisparse.transformers.forward import read_token_ids
from hisparse.transformers.session import Session, StoredPages
from hisparse.types import KVSpec
from hisparse.units import MemorySize

#: Rotary embeddings that transformers scales by the longest position of a forward.
_LENGTH_DEPENDENT: Final = {"dynamic", "longrope"}


class DB:
    """Contexts in a store on a disk, found by the tokens that they begin with.

    A session begins with the longest prefix that the store has: pages of any context, also of one
    that goes on otherwise, and pages of a server of the same model (docs/storage.md). Sessions
    share one host pool. Several processes may have the store open.

    Args:
        path: folder of the store; it is made if absent.
        model: a transformers model with its weights; hisparse is turned on for it, as by
            :func:`enable`. When its weights, adapters, hooks or training mode have changed, the
            calls that read or write the store raise an error; a forward of a session does if one
            of the last three has.
        size: most bytes of the store; a fraction is of the file system's size. None: no limit.
        ttl_s: seconds that an unused page stays; None: until its space is needed.
        page_tokens: tokens of a page of the store, a multiple of the settings' ``page_size``;
            None: the default ``--page-size`` of a server with these settings.
        sizes: ``max_batch_size``, ``max_length``, ``max_tokens`` and ``device``, as of
            :class:`HiSparseCache`. ``max_batch_size`` counts the rows of all open sessions.

    Raises:
        ConfigError: the model, a setting or a size is not supported.
        CapacityError: the sizes do not fit into memory.
        HiSparseError: the store cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        model: Any,
        config: HiSparseConfig | Mapping[str, Any] | None = None,
        *,
        size: MemorySize | None = None,
        ttl_s: float | None = None,
        page_tokens: int | None = None,
        **sizes: Any,
    ) -> None:
        settings = read_config(config, {})
        page_tokens = settings.server_page_size if page_tokens is None else page_tokens
        if page_tokens < 1 or page_tokens % settings.page_size:
            raise ConfigError(
                f"page_tokens: got {page_tokens}, expected a multiple of page_size "
                f"({settings.page_size})"
            )
        fingerprint = _fingerprint(model)
        _check_positions(model)
        unchanged = UnchangedModel(model)
        self._store = FileStore(path, size, ttl_s=ttl_s)
        try:
            self._cache = enable(model, settings, **sizes)
            rows = self._cache.row_store
            rows.check_forward = unchanged.check_forward
            self._pages = StoredPages(
                rows, self._store, settings, fingerprint, unchanged, page_tokens
            )
        except BaseException:
            self._store.close()
            raise

    def create_session(self, token_ids: Tensor | Sequence[int]) -> tuple[Session, Tensor]:
        """Begin a session with the longest stored prefix of a prompt.

        Args:
            token_ids: ``[n]``, any integer dtype, the prompt.

        Returns:
            The session, and the tokens that its cache lacks, ``[m]`` in the dtype of ``token_ids``,
            int64 of a list: at least two of a longer prompt, since one new token would be a decode
            step, and as many as the algorithm needs queries of.

        Raises:
            ConfigError: ``token_ids`` are no vector of token ids, or the model has changed.
            CapacityError: ``max_length``, ``max_batch_size`` or ``max_tokens`` is too small.
        """
        ids = read_token_ids(token_ids)
        self._check_length(len(ids))
        rest = max(2, self._cache.coordinator.algorithm.query_window)
        keys = self._pages.keys(ids[: max(0, len(ids) - rest)])
        slots = np.zeros(0, dtype=np.int64)
        if found := self._pages.find(keys):
            slots = self._pages.load(keys[:found])
        length = int(self._cache.row_store.lengths[slots].sum())
        is_token = np.ones((slots.size, length), dtype=np.bool_)
        loaded = torch.from_numpy(ids[None, :length]) if length else None
        cache = self._cache.with_rows(slots, is_token, loaded)
        return Session(cache, self._pages), torch.as_tensor(token_ids)[length:]

    def import_(
        self,
        token_ids: Tensor | Sequence[int],
        kv: Iterable[Sequence[Tensor | None]],
    ) -> int:
        """Store a context that was computed elsewhere, by dense attention of this model.

        Args:
            token_ids: ``[n]``, any integer dtype.
            kv: K and V of each layer in order, ``[Hkv, n, D]`` or ``[1, Hkv, n, D]`` each, in the
                model's dtype, K after the rotary embedding: a ``DynamicCache`` of transformers, or
                a list of pairs.

        Returns:
            Tokens from the first on that the store has now, in whole pages.

        Raises:
            ConfigError: an argument is not as described, or the model has changed.
            CapacityError: ``max_length`` is too small, or all rows are taken.
        """
        ids = read_token_ids(token_ids)
        self._check_length(len(ids))
        rows = self._cache.row_store
        spec = rows.coordinator.policy.kv
        layers = _read_layers(kv, spec, len(ids), rows.device)
        return self._pages.save_layers(layers, len(ids), self._pages.keys(ids))

    @property
    def counters(self) -> dict[str, int]:
        """Pages and bytes since the store was opened; see :attr:`FileStore.counters`."""
        return self._store.counters

    def flush(self) -> None:
        """Write to the disk what was stored, so that it outlives a loss of power."""
        self._store.flush()

    def close(self) -> None:
        """Flush and close the store. Open sessions go on without it."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_length(self, length: int) -> None:
        longest = self._cache.get_max_length()
        if length > longest:
            raise CapacityError(
                f"token_ids: got {length} tokens, expected at most max_length ({longest})"
            )


def _fingerprint(model: Any) -> str:
    """The fingerprint of a model; all its weights must be loaded."""
    found = model_fingerprint(model)
    if not found or any(x.is_meta for x in model.parameters()):
        what = "whose weights are offloaded" if found else "without weights"
        raise ConfigError(
            f"model: got a {type(model).__name__} {what}, expected a model with its weights: pages "
            "are found by the weights that computed them"
        )
    return found


def _check_positions(model: Any) -> None:
    """Require that a token's key depends only on its position."""
    found = rope_types(text_config(model)) & _LENGTH_DEPENDENT
    if found:
        raise ConfigError(
            f"model: got rope_type {found.pop()!r}, whose keys depend on the length of the whole "
            "prompt; expected a model whose prefixes have the same keys in every prompt"
        )


def _read_layers(
    kv: Iterable[Sequence[Tensor | None]], spec: KVSpec, length: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """K ``[T, Hkv, D]`` and V ``[T, Hkv, Dv]`` of each layer."""
    layers = []
    shapes = [(spec.num_kv_heads, length, width) for width in (spec.head_dim, spec.v_head_dim)]
    for number, given in enumerate(kv):
        if len(given) < 2:
            raise ConfigError(f"kv: layer {number}: got {len(given)} tensors, expected K and V")
        k, v = (
            _read_part(f"kv: layer {number}: {name}", part, shape, spec.dtype).to(device)
            for name, part, shape in zip("kv", given, shapes, strict=False)
        )
        layers.append((k, v))
    if len(layers) != spec.num_layers:
        raise ConfigError(f"kv: got {len(layers)} layers, expected {spec.num_layers}")
    return layers


def _read_part(name: str, part: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``[Hkv, T, D]`` or ``[1, Hkv, T, D]`` -> ``[T, Hkv, D]``."""
    if not isinstance(part, Tensor) or part.dtype != dtype:
        got = part.dtype if isinstance(part, Tensor) else type(part).__name__
        raise ConfigError(f"{name}: got {got}, expected {dtype}")
    if part.shape not in (shape, (1, *shape)):
        raise ConfigError(f"{name}: got {shorten(part.shape)}, expected {list(shape)}")
    return part.reshape(shape).transpose(0, 1).contiguous()
