"""From slots of rows to device pages: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation

__all__ = ["page_table"]

_I32, _I64 = torch.int32, torch.int64


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor, *, impl: str = "auto") -> Tensor:
    """Look up the device pages behind slots.

    Args:
        device_pages: ``[NR, C] int32``, of the rows' state.
        rows: ``[R] int64``, state row of each row.
        slots: ``[R, K] int32``, -1 for none.
        impl: "auto", or an implementation's name.

    Returns:
        ``[R, K] int32``, -1 where ``slots`` is -1.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_slots, device_pages, rows, slots)
    table: Tensor = implementation(impl, slots.device).page_table(device_pages, rows, slots)
    return table


def _check_slots(device_pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    device, count = slots.device, rows.shape[0]
    check_tensor("device_pages", device_pages, _I32, (None, None), device)
    check_tensor("rows", rows, _I64, (count,), device)
    check_tensor("slots", slots, _I32, (count, None))
