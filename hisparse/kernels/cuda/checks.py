"""Checked mode of the CUDA operations: what only the device knows is read back and judged.

Kernels never follow an index out of a tensor: they leave such an entry, or a whole row, alone, and
``lru_diff`` marks the row with ``num_misses`` = -1. Saying so takes a wait for the device, so it
is done in checked mode only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError

__all__ = ["check_diff", "check_indices", "checked", "set_checked"]

_checked = False


def set_checked(on: bool) -> None:
    """Switch checked mode on or off, for the whole process; off at first."""
    global _checked
    _checked = on


def checked() -> bool:
    """Whether checked mode is on and may wait: while a graph is captured, nothing may."""
    if not _checked:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_indices(name: str, index: Tensor, low: int, size: int) -> None:
    """Raise ``KernelError`` unless ``low <= index < size``, integers on any device."""
    if index.numel() == 0:
        return
    least, most = int(index.min()), int(index.max())
    if least < low or most >= size:
        got = least if least < low else most
        raise KernelError(f"{name}: got {got}, expected {low} to {size - 1}")


def check_diff(num_misses: Tensor, capacity: Tensor) -> None:
    """Raise ``KernelError`` if ``lru_diff`` refused a row.

    Args:
        num_misses: ``[R] int32``, -1 for a row that was refused and left unchanged.
        capacity: ``[R] int32``.
    """
    refused = (num_misses < 0).nonzero().flatten().tolist()
    if refused:
        row = refused[0]
        raise KernelError(
            f"selection: row {row} cannot be served, expected pages of the host page table, no "
            f"more of them than its capacity {int(capacity[row])}, and a state row with such slots"
        )
