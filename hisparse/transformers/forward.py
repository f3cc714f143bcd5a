"""One forward of a model: passes the columns that hold tokens to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.step import DecodeBatch, PrefillBatch, PrefillChunk
from hisparse.transformers.rows import RowStore


@dataclass(frozen=True, kw_only=True)
class Forward:
    """State that all layers of a forward share.

    Attributes:
        store: the rows; its coordinator has begun the forward, unless all columns are padding.
        is_token: ``[B, T] bool``, False at padding, for the columns of this forward.
        lengths: ``[B]``, tokens of each row after this forward.
        index: ``[tokens] int64``, places of the tokens among the B * T columns; None if no column
            is padding.
    """

    store: RowStore
    is_token: np.ndarray
    lengths: np.ndarray
    index: Tensor | None

    def attention(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer.

        Args:
            layer_id: layer number.
            q: ``[B, Hq, T, D]``.
            k, v: ``[B, Hkv, T, D]``.
            sinks: ``[Hq]``, see :meth:`SparseCoordinator.attention`; None: no sinks.

        Returns:
            ``[B, T, Hq, Dv]`` in the dtype of q, zeros at padding.
        """
        batch, heads, width, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        index, attention = self.index, self.store.coordinator.attention
        if index is None:
            out = attention(layer_id, q, k, v, sinks=sinks)
            return out.view(batch, width, heads, -1)
        padded = q.new_zeros(batch * width, heads, v.shape[-1])
        if index.numel():
            padded[index] = attention(layer_id, q[index], k[index], v[index], sinks=sinks)
        return padded.view(batch, width, heads, -1)

    def end(self) -> None:
        """End the coordinator's forward, after the last layer."""
        if self.is_token.any():
            self.store.coordinator.forward_end()


def begin_forward(
    store: RowStore, slots: np.ndarray, lengths: np.ndarray, is_token: np.ndarray
) -> Forward:
    """Allocate host pages for the new tokens and begin the coordinator's forward.

    A forward of one column is a decode step; a forward of more columns is part of a prompt.

    Args:
        store: the rows.
        slots: ``[B]``, request slots.
        lengths: ``[B]``, tokens of each row before the forward.
        is_token: ``[B, T] bool``, False at padding.

    Raises:
        CapacityError: too few host pages are free; nothing has changed.
    """
    counts = is_token.sum(1)
    new_lengths = lengths + counts
    store.grow(slots, lengths, new_lengths)
    index = None
    if not is_token.all():
        index = torch.from_numpy(np.flatnonzero(is_token)).to(store.device)
    if is_token.any():
        active = counts > 0
        make = _decode_batch if is_token.shape[1] == 1 else _prefill_batch
        batch = make(store, slots[active], lengths[active], counts[active])
        try:
            store.coordinator.forward_begin(batch)
        except BaseException:
            store.shrink(slots, new_lengths, lengths)
            raise
    return Forward(store=store, is_token=is_token, lengths=new_lengths, index=index)


def _decode_batch(
    store: RowStore, slots: np.ndarray, lengths: np.ndarray, counts: np.ndarray
) -> DecodeBatch:
    new_lengths = lengths + counts
    return DecodeBatch(
        slots=torch.from_numpy(slots).to(store.device),
        slots_cpu=slots,
        seq_lens=torch.from_numpy(new_lengths).to(store.device),
        seq_lens_cpu=new_lengths,
        host_slots=store.host_slots(slots, lengths, counts),
        host_page_table=store.page_table(slots, int(store.num_pages(new_lengths).max())),
    )


def _prefill_batch(
    store: RowStore, slots: np.ndarray, lengths: np.ndarray, counts: np.ndarray
) -> PrefillBatch:
    pages = store.num_pages(lengths + counts)
    offsets = counts.cumsum() - counts
    chunks = [
        PrefillChunk(
            slot=slot,
            start=start,
            length=count,
            offset=offset,
            host_pages=store.page_table(slots[row : row + 1], int(pages[row]))[0],
        )
        for row, (slot, start, count, offset) in enumerate(
            zip(slots.tolist(), lengths.tolist(), counts.tolist(), offsets.tolist(), strict=True)
        )
    ]
    return PrefillBatch(chunks=chunks, host_slots=store.host_slots(slots, lengths, counts))
