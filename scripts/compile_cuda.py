#!/usr/bin/env python
"""Compiles every CUDA source with nvcc and prints each kernel's resources; fails on any spill.

    .venv/bin/python scripts/compile_cuda.py [sm_80 sm_90 sm_100]

Warnings are errors. Nothing is linked or run, so no GPU is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hisparse.kernels.build.compiler import SOURCES, binding_flags
from hisparse.kernels.build.cuda import cuda_sources, find_nvcc

ARCHS = ("sm_80", "sm_90", "sm_100")
FLAGS = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v", "-c"]


class Usage(NamedTuple):
    """Resources of one kernel on one architecture: a number of registers, the rest in bytes."""

    source: str
    arch: str
    kernel: str
    registers: int
    spills: int
    stack: int
    shared: int


def parse(source: str, log: str) -> list[Usage]:
    """The kernels that ptxas reports on in ``log``."""
    found = []
    for part in log.split("Compiling entry function ")[1:]:
        name, arch = re.findall(r"'([^']+)'", part)[:2]
        stack, stores, loads = (
            int(re.search(rf"(\d+) bytes {what}", part)[1])
            for what in ("stack frame", "spill stores", "spill loads")
        )
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        found.append(
            Usage(source, arch, name, registers, stores + loads, stack, int((shared or [0, 0])[1]))
        )
    return found


def readable(kernel: str) -> str:
    """``kernel<uint4, GatherPagesParams>`` out of a mangled name, if c++filt is there."""
    try:
        result = subprocess.run(["c++filt", kernel], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return kernel
    name = result.stdout.strip().replace("hisparse::", "").removeprefix("void ")
    return re.sub(r"\([^()]*\)$", "", name)


def compile_all(nvcc: str, archs: tuple[str, ...]) -> list[Usage]:
    """Compile each source once for all ``archs``, on all processors.

    Raises:
        SystemExit: nvcc fails; with its output.
    """
    includes = [f"-I{SOURCES}", f"-I{SOURCES / 'include'}", *binding_flags()[0]]
    codes = [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in archs]

    def compile_one(path: Path) -> list[Usage]:
        target = ["-o", str(Path(folder) / f"{path.stem}.o")]
        command = [nvcc, *FLAGS, *codes, *includes, str(path), *target]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SystemExit(f"{path.name}:\n{result.stdout}{result.stderr}")
        return parse(path.name, result.stdout + result.stderr)

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        return [usage for found in pool.map(compile_one, cuda_sources()[0]) for usage in found]


def main() -> int:
    """Print the table; 1 if a kernel spills registers, 2 if there is no nvcc."""
    nvcc = find_nvcc()
    if nvcc is None:
        print("no nvcc found (looked in CUDA_HOME, /usr/local/cuda and PATH)", file=sys.stderr)
        return 2
    usages = compile_all(nvcc, tuple(sys.argv[1:]) or ARCHS)
    names = f"{'registers':>9} {'spills':>6} {'stack':>5} {'shared':>6}"
    print(f"{'source':16} {'arch':7} {names}  kernel")
    for u in usages:
        counts = f"{u.registers:9} {u.spills:6} {u.stack:5} {u.shared:6}"
        print(f"{u.source:16} {u.arch:7} {counts}  {readable(u.kernel)}")
    return 1 if any(u.spills for u in usages) else 0


if __name__ == "__main__":
    sys.exit(main())
