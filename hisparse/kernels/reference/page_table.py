"""From slots to device pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from hisparse.kernels.row_state import LruDiff, PageTables

__all__ = ["page_table", "page_tables"]


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`."""
    return device_pages[rows[:, None], slots.clamp(min=0)].masked_fill(slots < 0, -1)


def page_tables(
    device_pages: Tensor, rows: Tensor, diff: LruDiff, lengths: Tensor, tail_pages: Tensor
) -> PageTables:
    """See :func:`hisparse.kernels.page_tables`."""
    attended = pad(page_table(device_pages, rows, diff.curr_device_slots), (0, 1), value=-1)
    attended.scatter_(1, lengths[:, None].long(), tail_pages[:, None])
    return PageTables(attended, page_table(device_pages, rows, diff.load_device_slots))
