"""A transformers cache whose K/V lie in host memory, served by the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.metrics import CacheStats
from hisparse.errors import CapacityError, HiSparseError
from hisparse.transformers.attention import hand_over
from hisparse.transformers.build import Limits, build_store, read_config
from hisparse.transformers.check_inputs import check_layer, read_mask
from hisparse.transformers.context_file import StoredRows, read_rows, write_rows
from hisparse.transformers.forward import Forward, begin_forward
from hisparse.transformers.base_cache import BaseCache
from hisparse.transformers.rows import RowStore
from hisparse.transformers.model_shape import text_config

__all__ = ["HiSparseCache"]


class HiSparseCache(BaseCache):
    """Pass it as ``past_key_values`` to ``generate`` or ``forward`` of an enabled model.

    Prompts are attended densely and exactly, a forward of one column is a decode step. Columns
    that ``attention_mask`` hides are in no row: lengths, pages and selections count tokens only.

    Args:
        model: model, or its configuration, of transformers.
        config: the settings, as :class:`HiSparseConfig` or as a mapping.
        max_batch_size: rows at once, those of forks included.
        max_length: columns, padding included; None: what the model's configuration says.
        max_tokens: host memory for so many tokens of all rows together; None: every row may
            reach ``max_length``.
        device: where the model runs; None: the model's device.
        settings: keys of the configuration, in place of ``config``.

    Raises:
        ConfigError: the model, a setting or a size cannot be used.
        CapacityError: it does not fit into memory.
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
        limits = Limits(max_rows=max_batch_size, max_length=max_length, max_tokens=max_tokens)
        store, columns = build_store(model, read_config(config, settings), limits, device)
        self._set_up(store, columns, text_config(model).model_type)

    def _set_up(self, store: RowStore, max_length: int, model_type: str) -> None:
        super().__init__()
        self._store = store
        self._max_length = max_length
        self._model_type = model_type
        self._slots = np.zeros(0, dtype=np.int64)
        self._lengths = np.zeros(0, dtype=np.int64)
        self._real = np.zeros((0, 0), dtype=np.bool_)
        self._columns = 0
        self._forward: Forward | None = None
        self._updated: int | None = None
        #: ``[B, n] int64``, token ids of the first columns, where a file had them; else None.
        self.token_ids: Tensor | None = None

    # What transformers calls during a forward.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new K and V of a layer as they are: attention itself takes them in.

        Args:
            key_states: ``[B, Hkv, T, D]``.
            value_states: ``[B, Hkv, T, D]``.
            layer_idx: layer number.
            args: ignored.
            kwargs: ignored.
        """
        if self._updated is not None and layer_idx == self._updated + 1:
            raise HiSparseError(
                f"layer {self._updated} did not attend with hisparse; call "
                "hisparse.transformers.enable(model, ...) and use the cache that it returns"
            )
        self._updated = layer_idx
        return hand_over(key_states, self, layer_idx), value_states

    def attend(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Attention of one layer; called by the attention function, layer by layer.

        Args:
            layer_id: layer number.
            q: ``[B, Hq, T, D]``.
            k, v: ``[B, Hkv, T, D]``.
            mask: ``[B, columns + T] bool``, False at padding; None: there is none.
            scale: softmax scale.

        Returns:
            ``[B, T, Hq, D]``, zeros at padding.
        """
        policy = self._store.coordinator.policy
        check_layer(layer_id, q, k, v, scale, policy, self._store.device)
        if layer_id == 0:
            self._begin(q.shape[0], q.shape[2], mask)
        self._updated = None
        if self._forward is None:
            raise HiSparseError(f"layer {layer_id} attends first, expected layer 0")
        out = self._forward.attention(layer_id, q, k, v)
        if layer_id == policy.kv.num_layers - 1:
            self._finish()
        return out

    def _begin(self, batch: int, width: int, mask: Tensor | None) -> None:
        self._recover()
        columns = self._columns + width
        if columns > self._max_length:
            raise CapacityError(
                f"context: got {columns} columns, expected at most max_length ({self._max_length})"
            )
        if not self._columns and batch != self._slots.size:
            self.reset()
            self._adopt(self._store.open(batch), np.zeros((batch, 0), np.bool_), None)
        if batch != self._slots.size:
            raise HiSparseError(
                f"batch: got {batch} rows, expected the {self._slots.size} that the cache holds; "
                "reset() it, or fork(n) it for n continuations of each row"
            )
        real = read_mask(mask, self._real[:, : self._columns], width)
        self._forward = begin_forward(self._store, self._slots, self._lengths, real)

    def _finish(self) -> None:
        assert self._forward is not None, "a forward has begun"
        self._forward.end()
        self._lengths = self._forward.lengths
        self._append_columns(self._forward.real)
        self._forward = None

    def _append_columns(self, real: np.ndarray) -> None:
        first, self._columns = self._columns, self._columns + real.shape[1]
        self._real[:, first : self._columns] = real

    def _recover(self) -> None:
        """Undo a forward that ended by an exception."""
        self._updated = None
        if self._forward is not None:
            self._store.shrink(self._slots, self._forward.lengths, self._lengths)
            self._forward = None

    # What users and generate() ask for.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """``max_length``, columns."""
        return self._max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns with those of a forward, and the first one's number."""
        return self._columns + query_length, 0

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Tokens of each row, padding not counted."""
        return tuple(self._lengths.tolist())

    def stats(self) -> CacheStats:
        """What the cache and its forks did so far."""
        return self._store.coordinator.stats()

    @property
    def coordinator(self) -> SparseCoordinator:
        """What serves the cache and its forks: to look at, and to ``observe`` selections."""
        return self._store.coordinator

    def crop(self, tokens_to_remove: int) -> None:
        """Remove columns at the end.

        Args:
            tokens_to_remove: minus the number of columns, as in ``crop(-3)``.

        Raises:
            HiSparseError: the number is positive, or larger than the cache is long.
        """
        if not -self._columns <= tokens_to_remove <= 0:
            raise HiSparseError(
                f"crop: got {tokens_to_remove}, expected {-self._columns} to 0: minus the number "
                "of columns to remove"
            )
        self._recover()
        if tokens_to_remove == 0:
            return
        self._columns += tokens_to_remove
        left = self._real[:, : self._columns].sum(1)
        self._store.shrink(self._slots, self._lengths, left)
        self._lengths = left
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, : self._columns]

    def reset(self) -> None:
        """Give all rows back; the next forward may have another batch size."""
        self._recover()
        self._store.close(self._slots, self._lengths)
        self._set_up(self._store, self._max_length, self._model_type)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the rows, in the order given; the others are given back.

        Args:
            indices: ``[n] int64``, rows, none twice.

        Raises:
            HiSparseError: no row, a row twice, or one that is not there.
        """
        kept = indices.cpu().numpy()
        rows = np.arange(self._slots.size)
        there = kept.ndim == 1 and kept.dtype.kind == "i" and np.isin(kept, rows).all()
        if not there or not 0 < kept.size == np.unique(kept).size:
            raise HiSparseError(
                f"batch_select_indices: got {kept.tolist()}, expected one or more different rows "
                f"of 0 to {self._slots.size - 1}; fork(n) makes more of one"
            )
        self._recover()
        over = np.setdiff1d(rows, kept)
        self._store.close(self._slots[over], self._lengths[over])
        ids = None if self.token_ids is None else self.token_ids[kept]
        self._adopt(self._slots[kept], self._real[kept, : self._columns], ids)

    def fork(self, count: int = 1) -> HiSparseCache:
        """A cache with ``count`` rows for each row of this one, side by side.

        Full pages are shared, partial ones copied, so both go on apart from each other. The new
        cache is its own to :meth:`reset`, or to leave by ``with``.

        Args:
            count: at least 1.

        Raises:
            CapacityError: there is no room for the rows or their pages.
        """
        if count < 1:
            raise HiSparseError(f"fork: got {count} rows for each, expected at least 1")
        self._recover()
        child = HiSparseCache.__new__(HiSparseCache)
        child._set_up(self._store, self._max_length, self._model_type)
        slots = self._store.fork(self._slots, self._lengths, count)
        ids = None if self.token_ids is None else self.token_ids.repeat_interleave(count, dim=0)
        child._adopt(slots, self._real[:, : self._columns].repeat(count, axis=0), ids)
        return child

    @classmethod
    def join(cls, caches: Sequence[HiSparseCache]) -> HiSparseCache:
        """A cache with the rows of several, side by side in their order; those are empty then.

        Rows of the shorter ones end in padding, so ``position_ids`` of what comes next have to be
        given: they are ``row_lengths``. No token ids are kept; ``crop`` counts columns, as ever.

        Args:
            caches: a cache, its forks, or forks of these; at least one of them holds a row.

        Raises:
            HiSparseError: one that is given twice, or that shares no memory with the first one.
        """
        for cache in caches:
            cache._recover()
        slots = np.concatenate([cache._slots for cache in caches]) if caches else np.zeros(0)
        stores = {id(cache._store) for cache in caches}
        if len(stores) != 1 or not 0 < slots.size == np.unique(slots).size:
            raise HiSparseError(
                f"join: got {len(caches)} caches with {slots.size} rows of {len(stores)} memories, "
                "expected different ones that hold rows: a cache and its forks"
            )
        columns = max(cache._columns for cache in caches)
        real = [
            np.pad(cache._real[:, : cache._columns], ((0, 0), (0, columns - cache._columns)))
            for cache in caches
            if cache._slots.size
        ]
        joined = cls.__new__(cls)
        for cache in (joined, *caches):
            first = caches[0]
            cache._set_up(first._store, first._max_length, first._model_type)
        joined._adopt(slots, np.concatenate(real), None)
        return joined

    def save(self, path: str | Path, token_ids: Tensor | None = None) -> None:
        """Write the rows to a safetensors file, for :meth:`load`.

        Args:
            path: the file; one that is there is replaced.
            token_ids: ``[B, columns]``, to be kept beside K and V, and as ``token_ids`` of this
                cache; None: those that it has, if there is one for every column.

        Raises:
            HiSparseError: the cache is empty, or the ids have another shape.
        """
        self._recover()
        shape = (self._slots.size, self._columns)
        if not self._columns:
            raise HiSparseError("save: got an empty cache, expected at least one token")
        if token_ids is not None and token_ids.shape != shape:
            raise HiSparseError(
                f"save: got token_ids of shape {list(token_ids.shape)}, expected rows and columns "
                f"of the cache, {list(shape)}"
            )
        ids = self.token_ids if token_ids is None else token_ids
        if ids is not None and ids.shape != shape:
            ids = None  # The cache has grown since.
        self.token_ids = ids
        real = self._real[:, : self._columns]
        rows = StoredRows(slots=self._slots, real=real, token_ids=ids)
        write_rows(Path(path), self._store, rows, self._model_type)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Any,
        config: HiSparseConfig | Mapping[str, Any] | None = None,
        *,
        columns: int | None = None,
        **options: Any,
    ) -> HiSparseCache:
        """A cache that holds what :meth:`save` wrote, without a prefill.

        Representations are taken over where algorithm, options, page size and columns are those
        that they were made by, and made from the keys otherwise.

        Args:
            path: the file.
            model: as for the class; the very model whose K and V the file holds.
            config, options: as for the class.
            columns: the first of those stored, to go on in another way; None: all of them.

        Raises:
            ConfigError: the file is of another model shape or dtype, or no such file.
            CapacityError: its rows do not fit.
        """
        cache = cls(model, config, **options)
        rows = read_rows(Path(path), cache._store, cache._model_type, cache._max_length, columns)
        cache._adopt(rows.slots, rows.real, rows.token_ids)
        return cache

    def _adopt(self, slots: np.ndarray, real: np.ndarray, token_ids: Tensor | None) -> None:
        """Take over rows of the store: ``slots [B]``, ``real [B, columns]``."""
        self._slots, self._lengths = slots, real.sum(1)
        self._real = np.zeros((slots.size, self._max_length), dtype=np.bool_)
        self._columns = 0
        self._append_columns(real)
        self.token_ids = token_ids

    def __enter__(self) -> HiSparseCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()

    def __len__(self) -> int:
        """Layers."""
        return self._store.coordinator.policy.kv.num_layers

    def __repr__(self) -> str:
        return (
            f"HiSparseCache(algorithm={self._store.coordinator.algorithm}, "
            f"rows={self._slots.size}, columns={self._columns} of {self._max_length})"
        )
