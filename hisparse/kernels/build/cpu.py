"""Builds the C++ kernels for CPUs on first use, into a cache that is shared between runs."""

import functools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse.errors import KernelError
from hisparse.kernels.build.cache import CACHE
from hisparse.kernels.build.compiler import (
    SOURCES,
    CannotBuildError,
    binding_flags,
    compile_library,
)
from hisparse.kernels.build.isa import ISAS, chosen_isa

logger = logging.getLogger(__name__)

_SOURCES = SOURCES / "cpu"
_FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fPIC", "-Wall", "-Wextra"]
#: Of the calling thread, the :class:`CallRecorder` that it has entered.
_ENTERED = threading.local()


@functools.cache
def cpu_library() -> Any | None:
    """The library of CPU kernels, built first if needed; None, after a warning, on failure.

    Raises:
        ConfigError: ``HISPARSE_CPU_ISA`` names what this processor lacks.
    """
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(build_cpu()))
    except (ImportError, OSError, RuntimeError, CannotBuildError) as error:
        logger.warning("C++ kernels are off, PyTorch's operators do their work: %s", error)
        return None


def cpu_instruction_set() -> str | None:
    """What the CPU kernels are compiled for, such as "AVX-512"; None: there are no kernels."""
    library = cpu_library()
    return None if library is None else str(library.instruction_set())


def call_cpu(name: str, *arguments: object) -> None:
    """Call a kernel of the library, which must be there.

    Rows of every tensor must be contiguous.

    Raises:
        KernelError: the kernel refuses a tensor; one line that names it.
    """
    function = getattr(cpu_library(), name)
    _call(function, *arguments)
    recorder: CallRecorder | None = getattr(_ENTERED, "recorder", None)
    if recorder is not None:
        recorder.add(function, arguments)


def _call(function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        raise KernelError(str(error)) from None


class CallRecorder(TorchDispatchMode):
    """Records the kernel calls of the calling thread while entered, to make them again as one.

    This needs that kernels alone compute: PyTorch's operators may view tensors, and make new ones
    for results.

    Args:
        inputs: the tensors whose place changes from one time to the next.
        lasting: addresses of the storages of all else that calls may read and write, which are
            there as long as the calls are made again.
    """

    def __init__(self, inputs: Sequence[Tensor], *lasting: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        library: Any = cpu_library()
        self._add, self._run = library.record_calls(*inputs)
        self._inputs = [_extent(x) for x in inputs]
        self._lasting = lasting
        self._same = True  # Whether the calls would compute the same again.

    def __enter__(self) -> "CallRecorder":
        _ENTERED.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _ENTERED.recorder = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        new = operator.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty)
        self._same &= new or operator.is_view
        return operator(*args, **(kwargs or {}))

    def add(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Record a call, whose tensors are not kept."""
        placed: list[object] = []
        for argument in arguments:
            place = -1
            if isinstance(argument, Tensor) and argument.numel():
                place = _input_of(_extent(argument), self._inputs)
                if place < 0:
                    storage = argument.untyped_storage().data_ptr()
                    self._same &= any(storage in x for x in self._lasting)
            placed += place, argument
        self._add(function, *placed)

    @property
    def joined(self) -> Callable[..., bool] | None:
        """A function that makes the calls again, or None if that would not be the same.

        It takes tensors in place of ``inputs``. It returns False, and calls nothing, if their
        dtypes, shapes or strides are others. It raises ``KernelError`` as the calls do.
        """
        return functools.partial(_call, self._run) if self._same else None


def _extent(tensor: Tensor) -> range:
    """Addresses of a tensor's bytes, from its first element to its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = tensor.data_ptr()
    return range(first, first + (last + 1) * tensor.itemsize if tensor.numel() else first)


def _input_of(part: range, inputs: Sequence[range]) -> int:
    """The first input that starts where a part does, or the only one that holds it; -1: none."""
    starting = [i for i, x in enumerate(inputs) if part.start == x.start]
    holding = [i for i, x in enumerate(inputs) if x.start <= part.start and part.stop <= x.stop]
    return starting[0] if starting else holding[0] if len(holding) == 1 else -1


def build_cpu() -> Path:
    """Build the CPU kernels unless the cache has them; returns the path of the library."""
    sources, headers = cpu_sources()
    if not sources:
        raise CannotBuildError(f"got no sources in {_SOURCES}, expected C++ files")
    return build_cpu_library("cpu", "CPU kernels", sources, headers=headers)


def cpu_sources() -> tuple[list[Path], list[Path]]:
    """The files to compile, and the headers that they include."""
    headers = [*_SOURCES.glob("*.h"), SOURCES / "arguments.h"]
    headers += SOURCES.glob("include/hisparse/*.h")
    return sorted(_SOURCES.glob("*.cpp")), headers


def build_cpu_library(
    name: str, what: str, sources: Sequence[Path], *, headers: Iterable[Path] = ()
) -> Path:
    """Build a library with the flags of the CPU kernels, for the instruction set that is chosen.

    Args:
        name: beginning of the library's file name.
        what: the library, for the message.
        sources: C++ files.
        headers: files of csrc/cpu that the sources include; the library's name changes with them.

    Returns:
        the path of the library in the cache.

    Raises:
        CannotBuildError: there is no compiler, or it fails.
        ConfigError: ``HISPARSE_CPU_ISA`` names what this processor lacks.
    """
    includes, link = binding_flags()
    march = f"-march={ISAS[chosen_isa()].march}"
    command = [cxx_compiler(), *_FLAGS, march, *includes]
    return compile_library(CACHE / name, what, command, sources, headers, link)


def cxx_compiler() -> str:
    """Path of the compiler that ``CXX`` names, or of the first that is there.

    Raises:
        CannotBuildError: there is none.
    """
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise CannotBuildError(f"no C++ compiler found, expected one of {', '.join(wanted)}")
