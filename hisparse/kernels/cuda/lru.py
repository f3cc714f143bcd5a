"""LRU bookkeeping on CUDA devices; nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import dense_rows
from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.row_state import DecodeRows, DiffTables, LruDiff, RowState

__all__ = ["diff_tables", "lru_diff", "page_table", "promote_tail", "rebalance", "reset_rows"]


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
    # An empty tensor stands for None.
    limits = capacity.new_empty(0) if num_pages is None else dense_rows(num_pages)
    inputs = (selection, dense_rows(host_page_table), limits, capacity, num_real_rows)
    tables = (state.slot_pages, state.lru_order, state.page_slots)
    scratch = _scratch(state, rows, selection.shape[1])
    call_cuda("lru_diff", *inputs, dense_rows(rows), *tables, *out, scratch)
    return out


def diff_tables(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
) -> DiffTables:
    """See :func:`hisparse.kernels.diff_tables`."""
    count, every_page = rows.rows.shape[0], selection is None
    capacity = rows.capacity
    out = DiffTables(
        capacity.new_empty(count, width + 1),
        *(capacity.new_empty(shape) for shape in (count, (count, width), (count, width))),
        *(capacity.new_empty(count) for _ in range(2)),
    )
    if count == 0:
        return out
    # Empty tensors stand for None.
    selection = capacity.new_empty(count, 0) if selection is None else dense_rows(selection)
    lengths = capacity if lengths is None else dense_rows(lengths)
    none = capacity.new_empty(0)
    call_cuda(
        "diff_tables",
        selection,
        lengths,
        *(dense_rows(x) for x in (rows.host_page_table, rows.num_pages, capacity)),
        rows.num_real_rows,
        *(dense_rows(x) for x in (rows.rows, rows.tail_pages, rows.tail_lens)),
        none if rows.dense is None else dense_rows(rows.dense),
        none if rows.malformed is None else rows.malformed,
        *state,
        out.attended,
        out.loads,
        out.seq_lens,
        out.load_host_pages,
        out.num_hits,
        out.num_misses,
        _scratch(state, rows.rows, width),
        page_size,
        tail_below,
        every_page,
    )
    return out


def _scratch(state: RowState, rows: Tensor, width: int) -> Tensor:
    """``[R, bytes] uint8``; no bytes where shared memory is enough."""
    num_bytes = call_cuda("lru_diff_scratch_bytes", state.slot_pages, width)
    return rows.new_empty((rows.shape[0], num_bytes), dtype=torch.uint8)


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`; an index outside the table gives -1."""
    device_pages, rows, slots = (dense_rows(x) for x in (device_pages, rows, slots))
    table = torch.empty_like(slots)
    call_cuda("page_table", device_pages, rows, slots, table)
    return table


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
    inputs = (dense_rows(x) for x in (rows, page_index, filled, capacity))
    shape = (page_index.shape[0], kv_heads)
    copies = tuple(pool.new_empty(*shape, *pool.shape[-2:]) for pool in pools)
    # Without pools the kernel reads none of these.
    given, to = pools or (tail_pages,), copies or (tail_pages,)
    both = (given[0], given[-1], to[0], to[-1])
    call_cuda("promote_tail", *inputs, *state, tail_pages, *both, len(pools))
    return copies


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
