"""Triton's operations: the suite under Triton's interpreter, and compiled for real GPUs.

Both in a process of their own: whether kernels are interpreted is settled when Triton is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check import SUITES
from tests.kernels.sass import blocks_per_sm, ptx_fault
from tests.sizes import SWEEPS

ROOT = Path(__file__).parents[2]
#: Files of ``make gpu-check`` that compare implementations of an operation.
SUITE = [file for part in ("lru", "transfer", "attention", "fp8") for file in SUITES[part]]


@pytest.mark.sweeps
@pytest.mark.skipif(not SWEEPS, reason="takes minutes: make test-all PART=sweeps")
def test_gpu_check_s_suite_passes_without_a_gpu() -> None:
    """Through its proxy, with fibers and the interpreter in place of the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/kernels/{name}" for name in SUITE)],
        cwd=ROOT,
        # At the sizes of ``make test``: sweeps run the fibers without the proxy at theirs.
        env=os.environ | {"TRITON_INTERPRET": "1", "HISPARSE_TEST_CUDA": "proxy", "PART": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) > 700


@pytest.mark.sweeps
@pytest.mark.skipif(not SWEEPS, reason="takes minutes: make test-all PART=sweeps")
@pytest.mark.parametrize("archs", ["90", "80"])
def test_what_the_engine_launches_compiles_without_spills(archs: str) -> None:
    """For sm_90, and what only sm_80 launches: eight bits read as bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_compile", *archs.split()],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    *table, last = done.stdout.splitlines()
    assert last.endswith(" compiled, 0 with a fault")
    # Each GPU's format of summaries is among them, and K and V in eight bits. Queries are bf16.
    for arch in archs.split():
        formats = "bf16,fp32" if arch == "80" else "bf16,fp8e4nv,fp32"
        kernel = f"summary.score_kernel {formats}"
        assert any(line.startswith(f"sm_{arch}") and kernel in line for line in table)
    assert any(" attention.attend_kernel" in line and "scaled=1" in line for line in table)
    # Its PTX is looked at: barriers before and behind the arrival of a split.
    assert any(" attention.attend_kernel" in line and "split=1" in line for line in table)


def test_an_arrival_stands_between_two_barriers() -> None:
    right = """st.global.v4.b32 [%rd1], {%r1, %r2};
bar.sync 0; bar.sync 0;
@%p1 atom.global.gpu.acq_rel.add.u32 %r3, [%rd2], 1;
bar.sync 0;
ld.global.b32 %r4, [%rd1];"""
    assert ptx_fault(right, merges=True) == ""
    assert "bar.sync" in ptx_fault(right.replace("bar.sync 0; bar.sync 0;", ""), merges=True)
    assert "bar.sync" in ptx_fault(right.replace("bar.sync 0;\nld", "ld"), merges=True)
    assert "without" in ptx_fault(right.replace("acq_rel", "relaxed"), merges=True)
    assert "ld.global.nc" in ptx_fault(right.replace("ld.global", "ld.global.nc"), merges=False)


def test_blocks_that_fit_a_multiprocessor() -> None:
    """128 registers of 8 warps are half of them; then shared memory is what limits."""
    assert blocks_per_sm(90, 128, 8, 0) == 2
    assert blocks_per_sm(90, 94, 8, 0) == 2
    assert blocks_per_sm(80, 32, 4, 80 << 10) == 2
    assert blocks_per_sm(80, 32, 4, 0) == 16
