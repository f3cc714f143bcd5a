"""Groups of tensors that several operations take or return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["LruDiff", "PageTables", "RowState", "SelectionGuard"]


class RowState(NamedTuple):
    """Tables of one layer's rows: NR state rows of C slots each.

    Attributes:
        slot_pages: ``[NR, C] int32``, page index in the sequence that a slot holds, -1 if empty.
        lru_order: ``[NR, C] int32``, slots from cold to hot; -1 from the row's capacity on.
        device_pages: ``[NR, C] int32``, device page behind a slot; -1 from the capacity on.
    """

    slot_pages: Tensor
    lru_order: Tensor
    device_pages: Tensor


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


class PageTables(NamedTuple):
    """Device pages behind the slots of an :class:`LruDiff`; int32, -1 padded.

    Attributes:
        attended: ``[R, K + 1]``, page of each selected page, then the row's tail page.
        loads: ``[R, K]``, page that each miss is copied to, in the order of ``load_host_pages``.
        lengths: ``[R]``, pages of ``attended`` before the tail page.
    """

    attended: Tensor
    loads: Tensor
    lengths: Tensor


class SelectionGuard(NamedTuple):
    """Where :func:`hisparse.kernels.page_tables` counts rows whose selection is malformed.

    Attributes:
        num_real_rows: ``[1] int32``; rows from there on are padding and are not counted.
        malformed: ``[1] int64``, the counter.
    """

    num_real_rows: Tensor
    malformed: Tensor
