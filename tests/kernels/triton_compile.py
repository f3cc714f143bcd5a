"""Compiles the variants of Triton kernels that the engine launches, and prints what they take.

    .venv/bin/python -m tests.kernels.triton_compile [--whole] [80 90 100]

Needs no GPU. Exit code 1 if a kernel does not compile, spills registers, or asks for more shared
memory than a block may have. Another version of Triton is used if it comes first in PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.fake_cuda.variants import SHORT, WHOLE, Variant, variants
from tests.kernels.sass import blocks_per_sm, ptx_fault

ARCHS = (80, 90, 100)
#: Bytes of shared memory that a block may take: a launch that asks for more fails.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


class Usage(NamedTuple):
    """What a variant takes on one architecture.

    Attributes:
        variant: the kernel and its constants.
        arch: such as 90.
        registers: of a thread.
        spills: bytes.
        shared: bytes of shared memory.
        warps: of a block.
        error: why it did not compile, or what is wrong with its PTX; empty: nothing.
    """

    variant: str
    arch: int
    registers: int = 0
    spills: int = 0
    shared: int = 0
    warps: int = 0
    error: str = ""

    @property
    def fault(self) -> str:
        """Why a GPU could not run it well; empty: it can."""
        if self.error:
            return self.error
        if self.spills:
            return f"spills {self.spills} bytes of registers"
        if self.shared > SHARED_BYTES[self.arch]:
            return (
                f"asks for {self.shared} bytes of shared memory, at most {SHARED_BYTES[self.arch]}"
            )
        return ""

    def __str__(self) -> str:
        if self.error:
            return f"sm_{self.arch} {self.variant}: {self.error}"
        blocks = blocks_per_sm(self.arch, self.registers, self.warps, self.shared)
        return (
            f"sm_{self.arch:<4}{self.registers:5}{self.spills:7}{self.shared:8}{blocks:7}  "
            f"{self.variant}"
        )


HEADER = "arch    regs spills  shared blocks"


def compile_one(variant: Variant, arch: int) -> Usage:
    """Compile to machine code, and read ptxas's report and the PTX."""
    source = ASTSource(
        fn=variant.kernel,
        signature=dict(variant.signature),
        constexprs=dict(variant.constants),
        attrs={at: [["tt.divisibility", by]] for at, by in variant.attributes},
    )
    target = GPUTarget("cuda", arch, 32)
    try:
        compiled, log = compiled_with_report(source, target, dict(variant.options))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Usage(str(variant), arch, error=f"does not compile: {lines[-1]}")
    registers, spills = reported(log)
    return Usage(
        str(variant),
        arch,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        error=ptx_fault(compiled.asm["ptx"], merges=bool(variant.named.get("split"))),
    )


def compiled_with_report(
    source: ASTSource, target: GPUTarget, options: dict[str, Any]
) -> tuple[Any, str]:
    """What Triton compiled, and ptxas's report."""
    log = io.StringIO()
    # What a cache holds has no report.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope():
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            compiled = triton.compile(source, target=target, options=options)
    return compiled, log.getvalue()


def reported(log: str) -> tuple[int, int]:
    """Registers of a thread and bytes of spills in what ptxas reports of one kernel."""
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert len(spills) == 2, log
    return int(re.findall(r"Used (\d+) registers", log)[0]), sum(map(int, spills))


def disassembled(cubin: bytes) -> str:
    """Machine code as text, with labels."""
    tool: Any = triton.knobs.nvidia.nvdisasm.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [tool, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_all(whole: bool, archs: Sequence[int]) -> list[Usage]:
    """Derive the variants for each architecture, and compile them on all processors.

    Unless ``whole``, later architectures add what the earlier ones do not launch.
    """
    jobs: list[tuple[Variant, int]] = []
    seen: set[str] = set()
    for arch in archs:
        found = variants(WHOLE if whole else SHORT, divmod(arch, 10))
        if not whole:
            # Alignments of tensors and widths move few registers: one variant for each constants.
            found = list({str(each): each for each in found if str(each) not in seen}.values())
            seen.update(map(str, found))
        jobs += [(each, arch) for each in found]
    processors = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processors, mp_context=context) as pool:
        return list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=4))


def main() -> int:
    """Print a line for each variant, then the faults."""
    # Triton says once in which release a default will change.
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")
    asked = [text for text in sys.argv[1:] if text != "--whole"]
    if unknown := [text for text in asked if not text.isdigit() or int(text) not in SHARED_BYTES]:
        choices = ", ".join(map(str, SHARED_BYTES))
        print(f"triton_compile: error: got {unknown[0]!r}, expected {choices}", file=sys.stderr)
        return 2
    usages = compile_all("--whole" in sys.argv, [*map(int, asked)] or ARCHS)
    print(
        f"Triton {triton.__version__}: registers, bytes of spills and shared memory, blocks an SM"
    )
    print(HEADER)
    for usage in sorted(usages, key=lambda u: (u.variant, u.arch)):
        print(usage)
    faults = [f"{u.variant}, sm_{u.arch}: {u.fault}" for u in usages if u.fault]
    print(f"{len(usages)} compiled, {len(faults)} with a fault", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
