"""Compilers, compiled kernels, and attention libraries."""

from __future__ import annotations

from collections.abc import Callable

from hisparse.doctor.check import Check
from hisparse.errors import one_line

__all__ = ["adapters", "cpu_kernels", "cuda_kernels"]


def cpu_kernels() -> list[Check]:
    """Find or build the C++ kernels."""
    from hisparse.kernels.build.cpu import build_cpu

    remedy = "install g++ and apache-tvm-ffi (CXX names another compiler)"
    return [_built("CPU kernels", build_cpu, remedy)]


def cuda_kernels() -> list[Check]:
    """Find or build the CUDA kernels for the GPU of this machine."""
    import torch

    from hisparse.kernels.build.cuda import build_cuda, find_nvcc

    if not torch.cuda.is_available():
        message = f"no GPU to build for; nvcc: {find_nvcc() or 'not found'}"
        return [Check(name="CUDA kernels", status="ok", message=message)]
    remedy = "install nvcc (CUDA_HOME names its toolkit) and apache-tvm-ffi"
    return [_built("CUDA kernels", build_cuda, remedy)]


def _built(name: str, build: Callable[[], object], remedy: str) -> Check:
    from hisparse.kernels.build.compiler import CannotBuildError

    try:
        library = build()
    except (ImportError, OSError, CannotBuildError) as error:
        message = f"slower PyTorch code is used instead: {error}"
        return Check(name=name, status="warning", message=message, remedy=remedy)
    return Check(name=name, status="ok", message=str(library))


def adapters() -> list[Check]:
    """The attention libraries that work on this machine."""
    import torch

    from hisparse.adapters import ADAPTERS

    here = "cuda" if torch.cuda.is_available() else "cpu"
    works, not_here = [], []
    for name in ADAPTERS:
        adapter = ADAPTERS.get(name)
        why = _missing(adapter)
        if why is None and adapter.device_types and here not in adapter.device_types:
            why = f"for {' and '.join(adapter.device_types)}"
        if why is None:
            works.append(name)
        else:
            not_here.append(f"{name} ({why})")
    message = f"usable: {', '.join(works) or 'none'}; not usable: {', '.join(not_here) or 'none'}"
    return [Check(name="adapters", status="ok" if works else "error", message=message)]


def _missing(adapter: type) -> str | None:
    try:
        why: str | None = adapter.missing()  # type: ignore[attr-defined]
    except Exception as error:
        return one_line(error)
    return why
