"""Groups of tensors that several operations take or return."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DecodeRows", "DiffTables", "LruDiff", "RowState"]


class RowState(NamedTuple):
    """Tables of one layer's rows: NR state rows of C slots each.

    Attributes:
        slot_pages: ``[NR, C] int32``, page index in the sequence that a slot holds, -1 if empty.
        lru_order: ``[NR, C] int32``, slots from cold to hot; -1 from the row's capacity on.
        device_pages: ``[NR, C] int32``, device page behind a slot; -1 from the capacity on.
        page_slots: ``[NR, Pmax] int32``, where CUDA's operations look for a page: the slot of every
            resident page; entries of other pages mean nothing. None on a CPU, whose operations
            search ``slot_pages``.
    """

    slot_pages: Tensor
    lru_order: Tensor
    device_pages: Tensor
    page_slots: Tensor | None = None

    @classmethod
    def empty(cls, lru_order: Tensor, device_pages: Tensor, num_pages: int) -> RowState:
        """Tables of rows whose slots are all empty.

        Args:
            lru_order: ``[NR, C] int32``.
            device_pages: ``[NR, C] int32``.
            num_pages: pages of the longest sequence.
        """
        page_slots = lru_order.new_full((len(lru_order), num_pages), -1)
        return cls(torch.full_like(lru_order, -1), lru_order, device_pages, page_slots)

    def layer(self, layer_id: int) -> RowState:
        """One layer of tables ``[L, NR, ...]``."""
        held, order, pages, index = self
        each = (held[layer_id], order[layer_id], pages[layer_id])
        return RowState(*each, None if index is None else index[layer_id])


class LruDiff(NamedTuple):
    """Hits, misses and loads of one step; int32, -1 padded.

    Attributes:
        curr_device_slots: ``[R, K]``, row-local slot of each selected page, hit or miss.
        load_host_pages: ``[R, K]``, host pages of the misses, in order of first occurrence.
        load_device_slots: ``[R, K]``, row-local slot that each miss is loaded to.
        num_hits: ``[R]``, unique pages that were resident.
        num_misses: ``[R]``, unique pages that were not.
    """

    curr_device_slots: Tensor
    load_host_pages: Tensor
    load_device_slots: Tensor
    num_hits: Tensor
    num_misses: Tensor


class DecodeRows(NamedTuple):
    """The rows of a decode step in one layer; row ``r`` belongs to request ``r // (R // T)``.

    Attributes:
        rows: ``[R] int64``, state row of each row; twice as in :func:`hisparse.kernels.lru_diff`.
        capacity: ``[R] int32``, slots of each row.
        num_real_rows: ``[1] int32``; rows from there on are padding.
        host_page_table: ``[T, Pmax] int32``, host page of each page index.
        num_pages: ``[T] int32``, full pages of each request; a selection names no others.
        tail_pages: ``[R] int32``, device page of each row's tail.
        tail_lens: ``[R] int32``, tokens in the tail page.
        dense: ``[T] bool``, requests that attend every page, whatever is selected for them; None:
            no request does.
        malformed: ``[1] int64``, counts real rows whose selection is not ``lengths`` different
            pages, then nothing but -1, and rows that cannot be served; None: they are not counted.
    """

    rows: Tensor
    capacity: Tensor
    num_real_rows: Tensor
    host_page_table: Tensor
    num_pages: Tensor
    tail_pages: Tensor
    tail_lens: Tensor
    dense: Tensor | None = None
    malformed: Tensor | None = None


class DiffTables(NamedTuple):
    """What to attend and what to load; int32, -1 padded.

    Attributes:
        attended: ``[R, K + 1]``, device page of each selected page, then the row's tail page.
        seq_lens: ``[R]``, tokens to attend; every page but the tail page is full.
        loads: ``[R, K]``, device page that each miss is copied to.
        load_host_pages: ``[R, K]``, host pages of the misses, in order of first occurrence.
        num_hits: ``[R]``, unique pages that were resident.
        num_misses: ``[R]``, unique pages that were not; -1 in rows that cannot be served.
    """

    attended: Tensor
    seq_lens: Tensor
    loads: Tensor
    load_host_pages: Tensor
    num_hits: Tensor
    num_misses: Tensor
