"""Which implementation of the operations runs."""

from __future__ import annotations

from types import ModuleType

import torch

from hisparse.errors import KernelError, unknown_name
from hisparse.kernels import reference
from hisparse.kernels._build import cpu_library

__all__ = ["IMPLEMENTATIONS", "implementation"]

IMPLEMENTATIONS = ("reference", "cpu")


def implementation(impl: str, *devices: torch.device) -> ModuleType:
    """The module whose functions are to run on tensors of ``devices``.

    Args:
        impl: one of ``IMPLEMENTATIONS``, or "auto" for the fastest that can run.
        devices: where the tensors lie.

    Raises:
        KernelError: no such implementation, or it cannot run here.
    """
    if impl == "reference":
        return reference
    if impl not in ("auto", "cpu"):
        raise KernelError(unknown_name("implementation", impl, ("auto", *IMPLEMENTATIONS)))
    on_cpu = all(device.type == "cpu" for device in devices)
    if on_cpu and cpu_library() is not None:
        from hisparse.kernels import cpu

        return cpu
    if impl == "auto":
        return reference
    why = (
        "the library cannot be built"
        if on_cpu
        else "tensors are on " + ", ".join(sorted({str(d) for d in devices}))
    )
    raise KernelError(f"implementation 'cpu': {why} (choices: auto, reference)")
