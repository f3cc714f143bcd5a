"""LRU bookkeeping in C++."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.lru.op import DIFF_TABLES, LRU_DIFF, PAGE_TABLE, DecodeRows, RowState
from hisparse.kernels.lru.reference import with_dense_requests

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
    """See :func:`hisparse.kernels.lru_diff`; the tables of a row with an error are unchanged."""
    inputs = (selection, host_page_table, capacity, num_real_rows)
    return LRU_DIFF.on_cpu(*inputs, *state[:3], None, rows, num_pages)


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`."""
    return PAGE_TABLE.on_cpu(device_pages, rows, slots)[0]


def diff_tables(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.diff_tables`.

    A row that lacks a page keeps its length: attention refuses the -1.
    """
    dense = None
    if selection is None or lengths is None or rows.dense is not None or selection.shape[1] < width:
        selection, lengths, dense = with_dense_requests(selection, lengths, rows, width)
    # C++ takes `dense` by row.
    inputs = (selection, lengths, *rows[:7], dense, rows.malformed, *state[:3], None)
    return DIFF_TABLES.on_cpu(*inputs, more=(page_size, tail_below), K=width)
