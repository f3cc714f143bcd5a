"""One forward of a model over rows: which columns are tokens, and their way to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.step import DecodeBatch, PrefillBatch, PrefillChunk
from hisparse.transformers.rows import RowStore

__all__ = ["Forward", "begin_forward"]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What all layers of a forward share.

    Attributes:
        store: whose coordinator has begun the forward; not so when no token is real.
        real: ``[B, T] bool``, columns of this forward that are tokens and not padding.
        lengths: ``[B]``, tokens of each row after it.
        index: ``[tokens] int64``, the real tokens among the B * T; None when all of them are.
    """

    store: RowStore
    real: np.ndarray
    lengths: np.ndarray
    index: Tensor | None

    def attention(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer; zeros for padding.

        Args:
            layer_id: layer number.
            q: ``[B, Hq, T, D]``.
            k, v: ``[B, Hkv, T, D]``.

        Returns:
            ``[B, T, Hq, Dv]`` in the dtype of q.
        """
        batch, heads, width, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        index, attention = self.index, self.store.coordinator.attention
        if index is None:
            return attention(layer_id, q, k, v).view(batch, width, heads, -1)
        padded = q.new_zeros(batch * width, heads, v.shape[-1])
        if index.numel():
            padded[index] = attention(layer_id, q[index], k[index], v[index])
        return padded.view(batch, width, heads, -1)

    def end(self) -> None:
        """The last layer is done."""
        if self.real.any():
            self.store.coordinator.forward_end()


def begin_forward(
    store: RowStore, slots: np.ndarray, lengths: np.ndarray, real: np.ndarray
) -> Forward:
    """Give the rows their pages and begin the coordinator's forward.

    A single column is a decode step, as in a server; more are part of a prompt.

    Args:
        store: owner of the rows.
        slots: ``[B]``, request slots.
        lengths: ``[B]``, tokens that the rows hold.
        real: ``[B, T] bool``, which columns are tokens and not padding.

    Raises:
        CapacityError: there are not enough host pages; nothing has changed.
    """
    counts = real.sum(1)
    after = lengths + counts
    store.grow(slots, lengths, after)
    index = None
    if not real.all():
        index = torch.from_numpy(np.flatnonzero(real)).to(store.device)
    if real.any():
        active = counts > 0
        make = _decode_batch if real.shape[1] == 1 else _prefill_batch
        batch = make(store, slots[active], lengths[active], counts[active])
        try:
            store.coordinator.forward_begin(batch)
        except BaseException:
            store.shrink(slots, after, lengths)
            raise
    return Forward(store=store, real=real, lengths=after, index=index)


def _decode_batch(
    store: RowStore, slots: np.ndarray, lengths: np.ndarray, counts: np.ndarray
) -> DecodeBatch:
    after = lengths + 1
    return DecodeBatch(
        slots=torch.from_numpy(slots).to(store.device),
        slots_cpu=slots,
        seq_lens=torch.from_numpy(after).to(store.device),
        seq_lens_cpu=after,
        host_slots=store.host_slots(slots, lengths, counts),
        host_page_table=store.page_table(slots, int(store.num_pages(after).max())),
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
