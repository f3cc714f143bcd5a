"""``lru_diff`` and page tables in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.kernels.reference.lru import lru_diff
from hisparse.kernels.reference.page_table import page_table
from hisparse.kernels.row_state import DecodeRows, DiffTables, LruDiff, RowState

__all__ = ["diff_tables", "with_dense_requests"]


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
    pages, lengths, dense = with_dense_requests(selection, lengths, rows, width)
    diff = lru_diff(
        pages,
        rows.host_page_table,
        rows.capacity,
        rows.num_real_rows,
        state,
        rows.rows,
        None,
        rows.num_pages,
    )
    if rows.malformed is not None:
        rows.malformed.add_(_malformed(diff, lengths, rows.num_real_rows).sum())
    attended = page_table(state.device_pages, rows.rows, diff.curr_device_slots)
    absent = _lacks_page(attended, lengths)
    attended = pad(attended.masked_fill(absent[:, None], -1), (0, 1), value=-1)
    lengths = lengths.masked_fill(absent, 0)
    attended.scatter_(1, lengths[:, None].long(), rows.tail_pages[:, None])
    tail_lens = torch.where((lengths < tail_below) | dense, rows.tail_lens, 0)
    loads = page_table(state.device_pages, rows.rows, diff.load_device_slots)
    return DiffTables(
        attended,
        tail_lens + lengths * page_size,
        loads,
        diff.load_host_pages,
        diff.num_hits,
        diff.num_misses,
    )


def with_dense_requests(
    selection: Tensor | None, lengths: Tensor | None, rows: DecodeRows, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Write every page into the selections of dense requests.

    Returns:
        the selection ``[R, width]``, its lengths ``[R]``, and ``[R] bool``, rows of dense requests.
    """
    count, device = rows.rows.shape[0], rows.rows.device
    heads = count // max(len(rows.num_pages), 1)
    everything = rows.num_pages.repeat_interleave(heads)
    if selection is None or lengths is None:
        dense = torch.ones(count, dtype=torch.bool, device=device)
    elif rows.dense is None:
        dense = torch.zeros(count, dtype=torch.bool, device=device)
    else:
        dense = rows.dense.repeat_interleave(heads)
    if selection is not None and lengths is not None:
        selection = pad(selection, (0, width - selection.shape[1]), value=-1)
        if rows.dense is None:
            return selection, lengths, dense
    page = torch.arange(width, dtype=torch.int32, device=device)
    every_page = torch.where(page < everything[:, None], page, -1)
    if selection is None or lengths is None:
        return every_page, everything, dense
    return (
        torch.where(dense[:, None], every_page, selection),
        torch.where(dense, everything, lengths),
        dense,
    )


def _lacks_page(pages: Tensor, lengths: Tensor) -> Tensor:
    """``[R] bool``, rows without a page at one of the first ``lengths`` entries."""
    entry = torch.arange(pages.shape[1], device=lengths.device)
    absent = ((pages < 0) & (entry < lengths[:, None])).any(1)
    return absent | (lengths < 0) | (lengths > pages.shape[1])


def _malformed(diff: LruDiff, lengths: Tensor, num_real_rows: Tensor) -> Tensor:
    """``[R] bool``, real rows with a duplicate, a gap, a page too many, or that were refused."""
    rows, width = diff.curr_device_slots.shape
    entry = torch.arange(width, device=lengths.device)
    misplaced = (diff.curr_device_slots >= 0) != (entry < lengths[:, None])
    wrong = misplaced.any(1) | (diff.num_hits + diff.num_misses != lengths)
    return wrong & (torch.arange(rows, device=lengths.device) < num_real_rows)
