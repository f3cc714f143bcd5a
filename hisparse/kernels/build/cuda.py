"""Builds the CUDA kernels on first use, for the architecture of the device."""

import functools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from hisparse.errors import KernelError, one_line
from hisparse.kernels.build.cache import CACHE, is_intact, private_folder
from hisparse.kernels.build.compiler import (
    SOURCES,
    CannotBuildError,
    binding_flags,
    compile_library,
    digest_of,
)

logger = logging.getLogger(__name__)

_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-Werror", "all-warnings"]


def cuda_library() -> Any | None:
    """The library of CUDA kernels; None: there is none."""
    return _load()[0]


def why_no_cuda() -> str | None:
    """One line that says why there are no CUDA kernels; None: there are."""
    return _load()[1]


@functools.cache
def _load() -> tuple[Any | None, str | None]:
    """The library, built first if needed; on failure one line instead, which is logged."""
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(build_cuda())), None
    except CannotBuildError as error:
        reason = str(error)
    except (ImportError, OSError, RuntimeError) as error:
        reason = one_line(error)
    logger.warning("CUDA kernels are off, PyTorch's operators do their work: %s", reason)
    return None, reason


def call_cuda(name: str, *arguments: object) -> Any:
    """Call an operation of the library, which must be there, on the current stream.

    Raises:
        KernelError: a tensor is refused; one line that names it.
        RuntimeError: CUDA refuses a launch.
    """
    try:
        return getattr(cuda_library(), name)(*arguments)
    except ValueError as error:
        raise KernelError(str(error)) from None


def find_nvcc() -> str | None:
    """Path of nvcc: in ``CUDA_HOME``, else in the toolkit's usual place, else on ``PATH``."""
    homes = [os.environ.get("CUDA_HOME") or "/usr/local/cuda", "/usr/local/cuda"]
    for home in homes:
        if path := shutil.which("nvcc", path=f"{home}/bin"):
            return path
    return shutil.which("nvcc")


def cuda_sources() -> tuple[list[Path], list[Path]]:
    """The files to compile, and those files with all headers."""
    headers = [*SOURCES.glob("*.h"), *SOURCES.glob("include/hisparse/*.*h")]
    files = sorted(SOURCES.glob("*.cu"))
    return files, [*files, *headers]


def build_cuda(arch: str | None = None) -> Path:
    """Build the CUDA kernels unless the cache has them; returns the path of the library.

    Without nvcc it takes a library of the same sources from the cache, whichever nvcc built it.

    Args:
        arch: such as "sm_90"; that of the current device if None.

    Raises:
        CannotBuildError: there is neither a compiler nor a library, or the compiler fails.
        OSError: others own the cache or can write to it, or it cannot be written to.
    """
    arch = arch or device_arch()
    files, parts = cuda_sources()
    name = f"cuda-{arch}-{digest_of(parts)}"
    nvcc = find_nvcc()
    if nvcc is None:
        private_folder(CACHE)
        built = [path for path in sorted(CACHE.glob(f"{name}-*[0-9a-f].so")) if is_intact(path)]
        if built:
            return built[-1]
        raise CannotBuildError("no nvcc found, expected it in CUDA_HOME, /usr/local/cuda or PATH")
    includes, link = binding_flags()
    code = f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"
    command = [nvcc, *_FLAGS, code, f"-I{SOURCES / 'include'}", *includes]
    # nvcc divides what it passes on at commas.
    link = [*link[:2], "-Xlinker", link[2].removeprefix("-Wl,")]
    headers = set(parts) - set(files)
    return compile_library(CACHE / name, f"CUDA kernels for {arch}", command, files, headers, link)


def device_arch() -> str:
    """Architecture of the current device, such as "sm_90".

    Raises:
        CannotBuildError: there is no device.
    """
    if not torch.cuda.is_available():
        raise CannotBuildError("no CUDA device found, expected one or --arch")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
