"""From slots to device pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

__all__ = ["page_table"]


def page_table(
    device_pages: Tensor,
    rows: Tensor,
    slots: Tensor,
    lengths: Tensor | None,
    tail_pages: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.page_table`."""
    pages = device_pages[rows[:, None], slots.clamp(min=0)].masked_fill(slots < 0, -1)
    if lengths is None or tail_pages is None:
        return pages
    pages = pad(pages, (0, 1), value=-1)
    return pages.scatter_(1, lengths[:, None].long(), tail_pages[:, None])
