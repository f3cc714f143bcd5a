"""LRU bookkeeping on CUDA devices; nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import dense_rows
from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.row_state import LruDiff, PageTables, RowState, SelectionGuard

__all__ = ["lru_diff", "page_table", "page_tables", "promote_tail", "rebalance", "reset_rows"]


def lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    rows: Tensor,
    out: LruDiff | None = None,
    num_pages: Tensor | None = None,
) -> LruDiff:
    """See :func:`hisparse.kernels.lru_diff`.

    A row that cannot be served (more unique pages than capacity, a page beyond its limit, a state
    row or slot that does not exist) comes out as -1 with ``num_hits`` 0 and ``num_misses`` -1, and
    its tables stay as they are.
    """
    selection, capacity = dense_rows(selection), dense_rows(capacity)
    if out is None:
        entries = (torch.empty_like(selection) for _ in range(3))
        counts = (torch.empty_like(capacity) for _ in range(2))
        out = LruDiff(*entries, *counts)
    if selection.shape[0] == 0:
        return out
    tables = (state.slot_pages, state.lru_order)
    scratch_bytes = call_cuda("lru_diff_scratch_bytes", selection, state.slot_pages)
    scratch = selection.new_empty((selection.shape[0], scratch_bytes), dtype=torch.uint8)
    inputs = (selection, dense_rows(host_page_table), capacity, num_real_rows)
    # An empty tensor stands for None.
    limits = capacity.new_empty(0) if num_pages is None else dense_rows(num_pages)
    call_cuda("lru_diff", *inputs, *tables, dense_rows(rows), *out, limits, scratch)
    return out


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`; an index outside the table gives -1."""
    device_pages, rows, slots = (dense_rows(x) for x in (device_pages, rows, slots))
    table = torch.empty_like(slots)
    call_cuda("page_table", device_pages, rows, slots, table)
    return table


def page_tables(
    device_pages: Tensor,
    rows: Tensor,
    diff: LruDiff,
    lengths: Tensor,
    tail_pages: Tensor,
    guard: SelectionGuard | None = None,
) -> PageTables:
    """See :func:`hisparse.kernels.page_tables`; an index outside the table gives -1."""
    slots, loads = dense_rows(diff.curr_device_slots), dense_rows(diff.load_device_slots)
    attended = slots.new_empty((slots.shape[0], slots.shape[1] + 1))
    tables = PageTables(attended, torch.empty_like(loads), torch.empty_like(lengths))
    inputs = (device_pages, rows, slots, loads, lengths, tail_pages)
    # Empty tensors stand for None.
    counted = guard or SelectionGuard(lengths.new_empty(0), lengths.new_empty(0))
    counts = (diff.num_hits, diff.num_misses)
    call_cuda("page_tables", *(dense_rows(x) for x in inputs), *tables, *counts, *counted)
    return tables


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
) -> None:
    """See :func:`hisparse.kernels.promote_tail`."""
    inputs = (dense_rows(x) for x in (rows, page_index, filled, capacity))
    call_cuda("promote_tail", *inputs, *state, tail_pages)


def reset_rows(rows: Tensor, capacity: Tensor, states: RowState) -> None:
    """See :func:`hisparse.kernels.reset_rows`."""
    call_cuda("reset_rows", dense_rows(rows), dense_rows(capacity), *states)


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
) -> None:
    """See :func:`hisparse.kernels.rebalance`."""
    layers, _, slots = states.slot_pages.shape
    scratch = capacity.new_empty((layers, 2, slots))
    changed = torch.zeros_like(new_capacity)
    inputs = (dense_rows(rows), dense_rows(new_capacity))
    call_cuda("rebalance", *inputs, capacity, *states, free_pages, num_free, scratch, changed)
