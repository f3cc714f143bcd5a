"""Builds the C++ kernels for CPUs on first use, into a cache that is shared between runs."""

import functools
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
    try:
        getattr(cpu_library(), name)(*arguments)
    except ValueError as error:
        raise KernelError(str(error)) from None


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
