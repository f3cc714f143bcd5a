"""Chooses the implementation that runs an operation."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch

from hisparse.errors import KernelError, unknown_name
from hisparse.kernels import reference
from hisparse.kernels.build.cpu import cpu_library

__all__ = ["IMPLEMENTATIONS", "implementation"]

_Devices = tuple[torch.device, ...]

#: The devices of an operation's tensors, one or two of them, if all are in host memory.
_ON_CPU = {(torch.device("cpu"),) * count for count in (1, 2)}


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"hisparse.kernels.{name}")


def _cpu(devices: _Devices) -> ModuleType | str:
    if devices not in _ON_CPU:
        return _places(devices)
    if cpu_library() is None:
        return "the library cannot be built"
    return _module("cpu")


def _cuda(devices: _Devices) -> ModuleType | str:
    from hisparse.kernels.build.cuda import cuda_library

    # One side of a transfer may be host memory.
    if not _on_cuda(devices):
        return _places(devices)
    if cuda_library() is None:
        return "the library cannot be built"
    return _module("cuda")


def _triton(devices: _Devices) -> ModuleType | str:
    try:
        return importlib.import_module("hisparse.kernels.triton")
    except ImportError as error:
        return str(error)


# By name: a function that returns the module, or one line that says why it cannot run on devices.
_LOADERS: dict[str, Callable[[_Devices], ModuleType | str]] = {
    "reference": lambda devices: reference,
    "cpu": _cpu,
    "cuda": _cuda,
    "triton": _triton,
}
IMPLEMENTATIONS = tuple(_LOADERS)


def implementation(impl: str, *devices: torch.device) -> ModuleType:
    """The module that runs operations on tensors of ``devices``.

    Args:
        impl: one of ``IMPLEMENTATIONS``, or "auto" for the fastest that can run.
        devices: devices of the tensors.

    Raises:
        KernelError: no such implementation, or it cannot run here.
    """
    if impl == "auto":
        # Every kernel of a step on a CPU comes here, so this is a look-up.
        if devices in _ON_CPU:
            return reference if cpu_library() is None else _module("cpu")
        module = _cuda(devices)
        return reference if isinstance(module, str) else module
    if impl not in _LOADERS:
        raise KernelError(unknown_name("implementation", impl, ("auto", *IMPLEMENTATIONS)))
    module = _LOADERS[impl](devices)
    if isinstance(module, str):
        raise KernelError(f"implementation {impl!r}: {module} (choices: auto, reference)")
    return module


def _on_cuda(devices: _Devices) -> bool:
    kinds = {device.type for device in devices}
    return "cuda" in kinds and kinds <= {"cuda", "cpu"}


def _places(devices: _Devices) -> str:
    return "tensors are on " + ", ".join(sorted({str(device) for device in devices}))
