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

ROOT = Path(__file__).parents[2]
SUITE = [
    "test_attention.py",
    "test_fp8.py",
    "test_mla.py",
    "test_outline.py",
    "test_page_sketch.py",
    "test_page_summary.py",
    "test_select.py",
    "test_select_inputs.py",
    "test_splits.py",
]


def test_the_suite_passes_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/kernels/{name}" for name in SUITE)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) > 70


@pytest.mark.parametrize("arch", [80, 90, 100], ids=lambda a: f"sm_{a}")
def test_kernels_compile_without_spills(arch: int) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "triton_compile.py"), str(arch)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 22
    assert all(line.endswith(": 0 bytes spilled") for line in lines), done.stdout
