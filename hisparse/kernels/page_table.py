"""From slots of rows to the device pages that attention reads: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.checks import check_tensor
from hisparse.kernels.dispatch import implementation

__all__ = ["page_table"]


def page_table(
    device_pages: Tensor,
    rows: Tensor,
    slots: Tensor,
    lengths: Tensor | None = None,
    tail_pages: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """The device pages behind slots, and right after the last of them the row's tail page.

    Args:
        device_pages: ``[NR, C] int32``, of the rows' state.
        rows: ``[R] int64``, state row of each row.
        slots: ``[R, K] int32``, -1 for none.
        lengths: ``[R] int32``, where the tail page goes; None: nowhere.
        tail_pages: ``[R] int32``, device page of each row's tail.
        impl: "auto", or an implementation's name.

    Returns:
        ``[R, K] int32``, or ``[R, K + 1]`` with tail pages; -1 where there is no page.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    count, device = rows.shape[0], slots.device
    check_tensor("device_pages", device_pages, torch.int32, (None, None), device)
    check_tensor("rows", rows, torch.int64, (count,), device)
    check_tensor("slots", slots, torch.int32, (count, None))
    if lengths is not None and tail_pages is not None:
        check_tensor("lengths", lengths, torch.int32, (count,), device)
        check_tensor("tail_pages", tail_pages, torch.int32, (count,), device)
    module = implementation(impl, device)
    table: Tensor = module.page_table(device_pages, rows, slots, lengths, tail_pages)
    return table
