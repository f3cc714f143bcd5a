"""From slots to device pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.kernels.row_state import LruDiff, PageTables, SelectionGuard

__all__ = ["page_table", "page_tables"]


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`."""
    return device_pages[rows[:, None], slots.clamp(min=0)].masked_fill(slots < 0, -1)


def page_tables(
    device_pages: Tensor,
    rows: Tensor,
    diff: LruDiff,
    lengths: Tensor,
    tail_pages: Tensor,
    guard: SelectionGuard | None = None,
) -> PageTables:
    """See :func:`hisparse.kernels.page_tables`."""
    pages = page_table(device_pages, rows, diff.curr_device_slots)
    if guard is not None:
        guard.malformed.add_(_malformed(diff, lengths, guard.num_real_rows).sum())
        absent = _lacks_page(pages, lengths)
        pages, lengths = pages.masked_fill(absent[:, None], -1), lengths.masked_fill(absent, 0)
    attended = pad(pages, (0, 1), value=-1)
    attended.scatter_(1, lengths[:, None].long(), tail_pages[:, None])
    return PageTables(attended, page_table(device_pages, rows, diff.load_device_slots), lengths)


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
