"""Allocates memory whose pages are read in any order."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["zeros"]

_CPU = torch.device("cpu")


def zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU, *, pin: bool = False
) -> Tensor:
    """A tensor of zeros, on a CPU in huge memory pages where the system has them.

    They make reads of scattered pages up to 1.5 times as fast, and memory is committed on first
    touch; ``torch.zeros`` would touch the whole tensor at once.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: of the tensor.
        pin: page-lock host memory, for a GPU.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or pin or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin)
    # Private: the kernel treats a shared mapping as a file, usually without huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # This kernel has no huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
