"""LRU bookkeeping in C++."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.lru.op import DIFF_TABLES, DecodeRows, RowState
from hisparse.kernels.lru.reference import with_dense_requests


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
    tables: tuple[Tensor, ...] = DIFF_TABLES.on_cpu(
        selection, lengths, *rows[:7], dense, rows.malformed, *state, page_size, tail_below, width
    )
    return tables
