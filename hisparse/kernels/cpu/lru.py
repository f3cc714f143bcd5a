"""LRU bookkeeping in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.kernels.row_state import LruDiff, PageTables, RowState, SelectionGuard

__all__ = ["lru_diff", "page_table", "page_tables", "promote_tail", "rebalance"]


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
    """See :func:`hisparse.kernels.lru_diff`; the tables of a row with an error are unchanged."""
    selection, capacity = dense_rows(selection), dense_rows(capacity)
    if out is None:
        # empty_like is the cheapest way to make small tensors.
        entries = (torch.empty_like(selection) for _ in range(3))
        counts = (torch.empty_like(capacity) for _ in range(2))
        out = LruDiff(*entries, *counts)
    slot_pages, lru_order, _ = state
    table, rows = dense_rows(host_page_table), dense_rows(rows)
    inputs = (selection, table, capacity, num_real_rows)
    # An empty tensor stands for None.
    limits = capacity.new_empty(0) if num_pages is None else dense_rows(num_pages)
    call_cpu("lru_diff", *inputs, slot_pages, lru_order, rows, *out, limits)
    return out


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`."""
    slots = dense_rows(slots)
    table = torch.empty_like(slots)
    call_cpu("page_table", dense_rows(device_pages), dense_rows(rows), slots, table)
    return table


def page_tables(
    device_pages: Tensor,
    rows: Tensor,
    diff: LruDiff,
    lengths: Tensor,
    tail_pages: Tensor,
    guard: SelectionGuard | None = None,
) -> PageTables:
    """See :func:`hisparse.kernels.page_tables`.

    A row that lacks a page keeps its length: attention refuses the -1.
    """
    slots, loads = dense_rows(diff.curr_device_slots), dense_rows(diff.load_device_slots)
    attended = slots.new_empty(slots.shape[0], slots.shape[1] + 1)
    tables = (attended, torch.empty_like(loads))
    inputs = (device_pages, rows, slots, loads, lengths, tail_pages)
    # Empty tensors stand for None.
    counted = guard or SelectionGuard(lengths.new_empty(0), lengths.new_empty(0))
    counts = (diff.num_hits, diff.num_misses)
    call_cpu("page_tables", *(dense_rows(x) for x in inputs), *tables, *counts, *counted)
    return PageTables(*tables, lengths)


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
    call_cpu("promote_tail", *inputs, *state, tail_pages)


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
) -> None:
    """See :func:`hisparse.kernels.rebalance`."""
    inputs = (dense_rows(rows), dense_rows(new_capacity))
    call_cpu("rebalance", *inputs, capacity, *states, free_pages, num_free)
