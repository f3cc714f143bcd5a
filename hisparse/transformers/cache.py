"""A transformers cache that keeps K/V in host memory and decodes with sparse attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from hisparse.cache.counters import CacheStats
from hisparse.config import HiSparseConfig
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.errors import CapacityError, HiSparseError
from hisparse.transformers.build import build_store, read_config
from hisparse.transformers.forward import Forward, check_layer, read_mask
from hisparse.transformers.latents import from_latents, to_latents
from hisparse.types import AttentionRule

#: Attribute of a key tensor that holds its cache and layer.
_TAG = "_hisparse_cache"


def key_origin(keys: Tensor) -> tuple[HiSparseCache, int] | None:
    """The cache and the layer of new keys from :meth:`HiSparseCache.update`.

    ``keys [B, Hkv, T, D]`` have the model's dtype. A model passes its cache only to ``update``, and
    passes the keys that ``update`` returns to the attention function. The tag on the keys
    identifies the cache without any global state.
    """
    return vars(keys).get(_TAG)


class HiSparseCache(Cache):  # type: ignore[misc]
    """A cache to pass as ``past_key_values`` to ``generate`` or ``forward`` of an enabled model.

    Prompts get dense, exact attention. A forward of one column is a decode step. A row does not
    store the columns that ``attention_mask`` hides: lengths, pages and selections count tokens.

    Args:
        model: a transformers model or its configuration.
        config: the settings, as :class:`HiSparseConfig` or as a mapping.
        max_batch_size: rows at the same time, rows of forks included.
        max_length: columns per row, padding included; None for the model's context length.
        max_tokens: tokens in host memory, over all rows; None for ``max_length`` in every row.
        device: device of the model; None for ``model.device``.
        settings: keys of the configuration, instead of ``config``.

    Attributes:
        row_store: the host pool of the cache and its forks.
        token_ids: ``[B, n] int64``, token ids of the first n columns if a store had them, else
            None.

    Raises:
        ConfigError: the model, a setting or a size is not supported.
        CapacityError: the sizes do not fit into memory.
    """

    def __init__(
        self,
        model: Any,
        config: HiSparseConfig | Mapping[str, Any] | None = None,
        *,
        max_batch_size: int = 1,
        max_length: int | None = None,
        max_tokens: int | None = None,
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> None:
        merged = read_config(config, settings)
        super().__init__(layers=[])
        self.row_store, self._max_length = build_store(
            model, merged, max_batch_size, max_length, max_tokens, device
        )
        self._drop_rows()

    def _own(self, slots: np.ndarray, is_token: np.ndarray, token_ids: Tensor | None) -> None:
        """Take ownership of rows in the store; see :meth:`with_rows`."""
        self._slots, self._is_token = slots, is_token
        self.token_ids = token_ids
        self._forward: Forward | None = None
        self._updated_layer: int | None = None

    def _drop_rows(self) -> None:
        self._own(np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.bool_), None)

    # Called by transformers during a forward.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new K and V unchanged; :meth:`attend` stores them.

        Args:
            key_states, value_states: ``[B, Hkv, T, D]``, model's dtype.
            layer_idx: layer number.

        Raises:
            HiSparseError: the previous layer did not call :meth:`attend`.
        """
        if self._updated_layer is not None and layer_idx == self._updated_layer + 1:
            raise HiSparseError(
                f"layer {self._updated_layer}: got attention without hisparse, expected an enabled "
                "model; call hisparse.transformers.enable(model, ...) and use the cache it returns"
            )
        self._updated_layer = layer_idx
        vars(key_states)[_TAG] = self, layer_idx
        return key_states, value_states

    def attend(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        rule: AttentionRule,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer. The attention function calls this method for each layer in order.

        Args:
            q: ``[B, Hq, T, D]``, model's dtype, after the rotary embedding.
            k, v: ``[B, Hkv, T, D]``, model's dtype; K after the rotary embedding.
            mask: ``[B, columns + T] bool``, False at padding; None if no column is padding.
            rule: how the layer attends.
            sinks: ``[Hq]``, any float dtype, see :meth:`SparseCoordinator.attention`; None: none.

        Returns:
            ``[B, T, Hq, Dv]`` in the dtype of q, zeros at padding.

        Raises:
            HiSparseError: a tensor, the mask or the order of layers is not the expected one.
            CapacityError: the rows do not fit into ``max_length`` or ``max_tokens``.
        """
        store, policy = self.row_store, self.coordinator.policy
        heads, latents = k.shape[1], policy.kv.attention == "MLA"
        if latents:
            q, k, v = to_latents(q, k, v)
        check_layer(layer_id, q, k, v, rule, policy, store.device, self._max_length)
        if layer_id == 0:
            store.check_forward()
            self._begin(q.shape[0], q.shape[2], mask)
        self._updated_layer = None
        if self._forward is None:
            raise HiSparseError(f"forward: got layer {layer_id} first, expected layer 0")
        out = self._forward.attention(layer_id, q, k, v, sinks)
        if layer_id == policy.kv.num_layers - 1:
            self._forward.end()
            self._is_token = np.concatenate([self._is_token, self._forward.is_token], axis=1)
            self._forward = None
        return from_latents(out, heads) if latents else out

    def _begin(self, batch: int, width: int, mask: Tensor | None) -> None:
        self._recover()
        columns = self.get_seq_length() + width
        if columns > self._max_length:
            raise CapacityError(
                f"context: got {columns} columns, expected at most max_length ({self._max_length})"
            )
        if columns == width and batch != self._slots.size:
            self.reset()
            self._own(self.row_store.open(batch), np.zeros((batch, 0), np.bool_), None)
        if batch != self._slots.size:
            raise HiSparseError(
                f"batch: got {batch} rows, expected the {self._slots.size} that the cache holds; "
                "reset() the cache, or fork(n) it for n continuations of each row"
            )
        is_token = read_mask(mask, self._is_token, width)
        self._forward = Forward(self.row_store, self._slots, is_token)

    def _recover(self) -> None:
        """Undo a forward that an exception ended."""
        self._updated_layer = None
        if self._forward is not None:
            self._forward.undo()
            self._forward = None

    # Transformers calls these. They allow greedy decoding and sampling only.

    @property
    def is_croppable(self) -> bool:
        """False, which turns assisted generation off."""
        return False

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Maximum number of columns, ``max_length``."""
        return self._max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of columns after a forward of ``query_length`` columns, and the first index."""
        return self.get_seq_length() + query_length, 0

    def __exit__(self, *_: object) -> None:
        self.reset()

    def activate_past_recording(self) -> NoReturn:
        """Rejected: assisted generation."""
        raise HiSparseError(
            "generate: got assisted generation, which verifies several tokens in one dense "
            "forward; expected generate without an assistant"
        )

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Reject beam search, which gives ``beam_idx [beams] int64``."""
        raise HiSparseError(
            f"beam search: got {beam_idx.numel()} beams, expected num_beams=1 (greedy or sampling)"
        )

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Rejected: ``fork`` repeats rows without copying full pages."""
        raise HiSparseError(
            f"cache: got batch_repeat_interleave({repeats}), expected cache.fork({repeats})"
        )

    # Called by users and by generate().

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns, padding included."""
        return int(self._is_token.shape[1])

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Number of tokens in each row, without padding."""
        return tuple(self._is_token.sum(1).tolist())

    @property
    def slots(self) -> np.ndarray:
        """``[B] int64``, request slots of the rows in :attr:`row_store`."""
        self._recover()
        return self._slots

    def stats(self) -> CacheStats:
        """Hits, misses and bytes of the cache and its forks so far."""
        return self.coordinator.stats()

    @property
    def coordinator(self) -> SparseCoordinator:
        """The engine of the cache and its forks, for example to ``observe`` selections."""
        return self.row_store.coordinator

    def crop(self, tokens_to_remove: int) -> None:
        """Remove columns from the end.

        Args:
            tokens_to_remove: the number of columns, negated, as in ``crop(-3)``.

        Raises:
            HiSparseError: the number is positive, or the cache has fewer columns.
        """
        columns = self.get_seq_length()
        if not -columns <= tokens_to_remove <= 0:
            raise HiSparseError(
                f"crop: got {tokens_to_remove}, expected {-columns} to 0: the number of "
                "columns to remove, negated"
            )
        self._recover()
        if tokens_to_remove == 0:
            return
        self._is_token = self._is_token[:, : columns + tokens_to_remove]
        self.row_store.shrink(self._slots, self._is_token.sum(1))
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, : columns + tokens_to_remove]

    def reset(self) -> None:
        """Free all rows. The next forward may have another batch size."""
        self._recover()
        self.row_store.close(self._slots)
        self._drop_rows()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, in the given order, and free the others.

        Args:
            indices: ``[n] int64``, distinct rows.

        Raises:
            HiSparseError: ``indices`` is empty, repeats a row or names one that does not exist.
        """
        kept = indices.cpu().numpy()
        rows = np.arange(self._slots.size)
        exist = kept.ndim == 1 and kept.dtype.kind == "i" and np.isin(kept, rows).all()
        if not exist or not 0 < kept.size == np.unique(kept).size:
            raise HiSparseError(
                f"batch_select_indices: got {kept.tolist()}, expected one or more different rows "
                f"of 0 to {self._slots.size - 1}; fork(n) repeats rows"
            )
        self._recover()
        self.row_store.close(self._slots[np.setdiff1d(rows, kept)])
        ids = None if self.token_ids is None else self.token_ids[kept]
        self._own(self._slots[kept], self._is_token[kept], ids)

    def fork(self, count: int = 1) -> HiSparseCache:
        """Make a cache with ``count`` rows for each row of this one, next to each other.

        Both caches share full pages. The new cache copies partial pages, so that each cache
        continues independently. Free its rows with :meth:`reset` or with a ``with`` block.

        Args:
            count: rows for each row, at least 1.

        Raises:
            CapacityError: ``max_batch_size`` or ``max_tokens`` is too small.
        """
        if count < 1:
            raise HiSparseError(f"fork: got {count} rows for each row, expected at least 1")
        self._recover()
        slots = self.row_store.fork(self._slots, count)
        ids = None if self.token_ids is None else self.token_ids.repeat_interleave(count, dim=0)
        return self.with_rows(slots, self._is_token.repeat(count, axis=0), ids)

    def with_rows(
        self, slots: np.ndarray, is_token: np.ndarray, token_ids: Tensor | None
    ) -> HiSparseCache:
        """Make a cache of rows in this cache's host pool; the new cache owns them.

        Args:
            slots: ``[B] int64``, request slots.
            is_token: ``[B, columns] bool``, False at padding.
            token_ids: ``[B, n] int64``, of the first n columns, or None.
        """
        cache = HiSparseCache.__new__(HiSparseCache)
        Cache.__init__(cache, layers=[])
        cache.row_store, cache._max_length = self.row_store, self._max_length
        cache._own(slots, is_token, token_ids)
        return cache

    @classmethod
    def join(cls, caches: Sequence[HiSparseCache]) -> HiSparseCache:
        """Move the rows of several caches into one, in order, which empties the given caches.

        Shorter rows end in padding, so pass ``position_ids`` with the next columns; they start at
        ``row_lengths``. The joined cache has no token ids. ``crop`` counts columns as before.

        Args:
            caches: a cache, its forks, or forks of its forks; at least one of them holds a row.

        Raises:
            HiSparseError: a cache occurs twice, or the caches do not share one host pool.
        """
        for cache in caches:
            cache._recover()
        slots = np.concatenate([cache._slots for cache in caches]) if caches else np.zeros(0)
        stores = {id(cache.row_store) for cache in caches}
        if len(stores) != 1 or not 0 < slots.size == np.unique(slots).size:
            raise HiSparseError(
                f"join: got {len(caches)} caches with {slots.size} rows in {len(stores)} host "
                "pools, expected different caches that hold rows in one pool: a cache and its forks"
            )
        columns = max(cache.get_seq_length() for cache in caches)
        is_token = [
            np.pad(cache._is_token, ((0, 0), (0, columns - cache.get_seq_length())))
            for cache in caches
            if cache._slots.size
        ]
        joined = caches[0].with_rows(slots, np.concatenate(is_token), None)
        for cache in caches:
            cache._drop_rows()
        return joined

    def __enter__(self) -> HiSparseCache:
        return self

    def __len__(self) -> int:
        """Number of layers."""
        return self.coordinator.policy.kv.num_layers

    def __repr__(self) -> str:
        return (
            f"HiSparseCache(algorithm={self.coordinator.algorithm}, "
            f"rows={self._slots.size}, columns={self.get_seq_length()} of {self._max_length})"
        )
