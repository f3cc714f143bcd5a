"""From slots to device pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

from torch import Tensor

__all__ = ["page_table"]


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See :func:`hisparse.kernels.page_table`."""
    return device_pages[rows[:, None], slots.clamp(min=0)].masked_fill(slots < 0, -1)
