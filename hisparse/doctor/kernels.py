"""Compilers, compiled kernels, and attention libraries."""

from __future__ import annotations

from collections.abc import Callable

from hisparse.doctor.check import Check
from hisparse.errors import one_line


def cpu_kernels() -> list[Check]:
    """Find or build the C++ kernels."""
    from hisparse.kernels.build.cpu import build_cpu, cpu_instruction_set
    from hisparse.kernels.build.isa import VARIABLE, chosen_isa

    def build() -> str:
        path, isa = build_cpu(), chosen_isa()
        asked = "" if isa == "native" else f", as {VARIABLE}={isa} asks"
        return f"C++ for {cpu_instruction_set()}{asked}: {path}"

    remedy = "install g++ and apache-tvm-ffi (CXX names another compiler)"
    return [_built("CPU kernels", build, remedy)]


def cuda_kernels() -> list[Check]:
    """Find or build the CUDA kernels for the GPU of this machine."""
    import torch

    from hisparse.kernels.build.cuda import build_cuda, find_nvcc

    if not torch.cuda.is_available():
        message = f"not used: there is no GPU to build for; nvcc: {find_nvcc() or 'not found'}"
        return [Check(name="CUDA kernels", status="ok", message=message)]
    remedy = "install nvcc (CUDA_HOME names its toolkit) and apache-tvm-ffi"
    return [_built("CUDA kernels", lambda: f"CUDA C++: {build_cuda()}", remedy)]


def triton_kernels() -> list[Check]:
    """Whether the Triton kernels run, which score, select and attend on a GPU."""
    import torch

    if not torch.cuda.is_available():
        message = "not used: there is no GPU"
        return [Check(name="Triton kernels", status="ok", message=message)]
    try:
        import triton
    except ImportError as error:
        message = f"slower PyTorch code is used instead: {error}"
        remedy = "pip install triton"
        return [Check(name="Triton kernels", status="warning", message=message, remedy=remedy)]
    return [Check(name="Triton kernels", status="ok", message=f"Triton {triton.__version__}")]


def _built(name: str, build: Callable[[], str], remedy: str) -> Check:
    from hisparse.kernels.build.compiler import CannotBuildError

    try:
        message = build()
    except (ImportError, OSError, CannotBuildError) as error:
        message = f"slower PyTorch code is used instead: {error}"
        return Check(name=name, status="warning", message=message, remedy=remedy)
    return Check(name=name, status="ok", message=message)


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
