"""Which implementation of the operations runs."""

from __future__ import annotations

from types import ModuleType

import torch

from hisparse.errors import KernelError, unknown_name
from hisparse.kernels import reference

__all__ = ["IMPLEMENTATIONS", "implementation"]

IMPLEMENTATIONS = ("reference",)


def implementation(impl: str, *devices: torch.device) -> ModuleType:
    """The module whose functions are to run on tensors of ``devices``.

    Args:
        impl: one of ``IMPLEMENTATIONS``, or "auto" for the fastest that can run.
        devices: where the tensors lie.

    Raises:
        KernelError: no such implementation.
    """
    if impl in ("auto", "reference"):
        return reference
    raise KernelError(unknown_name("implementation", impl, ("auto", *IMPLEMENTATIONS)))
