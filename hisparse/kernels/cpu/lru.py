"""LRU bookkeeping in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.kernels.reference.diff_tables import with_dense_requests
from hisparse.kernels.reference.lru import copy_tails
from hisparse.kernels.row_state import DecodeRows, DiffTables, LruDiff, RowState

__all__ = ["diff_tables", "lru_diff", "page_table", "promote_tail", "rebalance"]


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
    slot_pages, lru_order = state[:2]
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


def diff_tables(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
) -> DiffTables:
    """See :func:`hisparse.kernels.diff_tables`.

    A row that lacks a page keeps its length: attention refuses the -1.
    """
    # Empty tensors stand for None.
    none = rows.num_real_rows.new_empty(0)
    dense = none
    if selection is None or lengths is None or rows.dense is not None or selection.shape[1] < width:
        selection, lengths, dense = with_dense_requests(selection, lengths, rows, width)
    selection, capacity = dense_rows(selection), dense_rows(rows.capacity)
    # empty_like is the cheapest way to make small tensors.
    out = DiffTables(
        selection.new_empty(selection.shape[0], width + 1),
        torch.empty_like(capacity),
        torch.empty_like(selection),
        torch.empty_like(selection),
        torch.empty_like(capacity),
        torch.empty_like(capacity),
    )
    call_cpu(
        "diff_tables",
        selection,
        *(dense_rows(x) for x in (lengths, rows.host_page_table, rows.num_pages)),
        capacity,
        rows.num_real_rows,
        *(dense_rows(x) for x in (rows.rows, rows.tail_pages, rows.tail_lens)),
        dense,
        none if rows.malformed is None else rows.malformed,
        *state[:3],
        *out,
        page_size,
        tail_below,
    )
    return out


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
    pools: tuple[Tensor, ...],
    kv_heads: int,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.promote_tail`."""
    copies = copy_tails(pools, tail_pages[rows], len(page_index), kv_heads)
    inputs = (dense_rows(x) for x in (rows, page_index, filled, capacity))
    call_cpu("promote_tail", *inputs, *state[:3], tail_pages)
    return copies


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
    call_cpu("rebalance", *inputs, capacity, *states[:3], free_pages, num_free)
