"""Builds the C++ kernels on first use, into a cache that is shared between runs."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from hisparse.errors import KernelError

__all__ = ["build_cpu", "call_cpu", "cpu_library", "dense_rows"]

logger = logging.getLogger(__name__)

# In a checkout hisparse/_csrc is a link to csrc/; a wheel holds the files themselves.
_SOURCES = Path(__file__).resolve().parents[1] / "_csrc" / "cpu"
_CACHE = Path.home() / ".cache" / "hisparse" / "kernels"
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra"]


class _CannotBuildError(Exception):
    """Why there is no library; the message is one line."""


@functools.cache
def cpu_library() -> Any | None:
    """The loaded library of CPU kernels, built if need be; None, said once, if it cannot be."""
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(build_cpu()))
    except (ImportError, OSError, _CannotBuildError) as error:
        logger.warning("C++ kernels are off, PyTorch's operators do their work: %s", error)
        return None


def call_cpu(name: str, *arguments: object) -> None:
    """Call a kernel of the library, which must be there.

    Kernels read rows of contiguous elements; what they write to must have such rows.

    Raises:
        KernelError: the kernel refuses a tensor; one line that names it.
    """
    try:
        getattr(cpu_library(), name)(*arguments)
    except ValueError as error:
        raise KernelError(str(error)) from None


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def build_cpu() -> Path:
    """Build the CPU kernels unless the cache has them; returns the path of the library."""
    from tvm_ffi import libinfo

    compiler = _compiler()
    sources = sorted(_SOURCES.glob("*.cpp"))
    if not sources:
        raise _CannotBuildError(f"no sources in {_SOURCES}")
    library = Path(libinfo.find_libtvm_ffi())
    headers = [f"-I{path}" for path in libinfo.include_paths()]
    link = [f"-L{library.parent}", "-ltvm_ffi", f"-Wl,-rpath,{library.parent}"]
    command = [compiler, *_FLAGS, *headers, *map(str, sources), *link]
    target = _CACHE / f"cpu-{_key(compiler, command)}.so"
    if not target.exists():
        _build(command, target)
    return target


def _compiler() -> str:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise _CannotBuildError(f"no C++ compiler found (looked for {', '.join(wanted)})")


def _key(compiler: str, command: list[str]) -> str:
    """Changes with the sources, the compiler, its flags and the processor."""
    digest = hashlib.sha256("\n".join(command).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    digest.update(version.stdout + _processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What ``-march=native`` looks at: libraries in a shared home must not cross machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return platform.machine() + "".join(
        sorted({line for line in lines if line.split("\t")[0].strip() in names})
    )


def _build(command: list[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():  # Another process has just built it.
            return
        print(f"hisparse: building CPU kernels into {target.parent} ...", file=sys.stderr)
        start = time.perf_counter()
        # Never a half-written library under the final name.
        partial = target.with_suffix(".partial.so")
        result = subprocess.run(
            [*command, "-o", str(partial)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            logger.debug("%s", result.stderr)
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            first = errors[0] if errors else f"exit code {result.returncode}"
            raise _CannotBuildError(f"{command[0]} failed: {first}")
        partial.replace(target)
        logger.info("built %s in %.1f s", target, time.perf_counter() - start)
