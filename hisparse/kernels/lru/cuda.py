"""LRU bookkeeping on CUDA devices; nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.lru.op import DIFF_TABLES, LRU_DIFF, PAGE_TABLE, DecodeRows, RowState

__all__ = ["diff_tables", "lru_diff", "page_table"]


def lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    rows: Tensor,
    num_pages: Tensor | None,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.lru_diff`.

    A row that cannot be served (more unique pages than capacity, a page beyond its limit, a state
    row or slot that does not exist) comes out as -1 with ``num_hits`` 0 and ``num_misses`` -1, and
    its tables stay as they are.
    """
    inputs = (selection, host_page_table, capacity, num_real_rows, *state, rows, num_pages)
    return LRU_DIFF.on_cuda(*inputs, more=(_scratch(state, rows, selection.shape[1]),))


def diff_tables(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.diff_tables`."""
    more = (_scratch(state, rows.rows, width), page_size, tail_below)
    return DIFF_TABLES.on_cuda(selection, lengths, *rows, *state, more=more, K=width)


def _scratch(state: RowState, rows: Tensor, width: int) -> Tensor:
    """``[R, bytes] uint8``; no bytes where shared memory is enough."""
    num_bytes = call_cuda("lru_diff_scratch_bytes", state.slot_pages, width)
    return rows.new_empty((rows.shape[0], num_bytes), dtype=torch.uint8)


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`; an index outside the table gives -1."""
    return PAGE_TABLE.on_cuda(device_pages, rows, slots)[0]
