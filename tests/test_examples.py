"""What docs/write-an-algorithm.md builds is what lies in examples/, and does what the text says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.models import fetch
from hisparse.testing import CHECKS

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "hisparse-knorm"
DOC = (ROOT / "docs" / "write-an-algorithm.md").read_text(encoding="utf-8")


def test_the_text_builds_the_example() -> None:
    blocks = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", DOC, re.DOTALL))
    files = {p.name: p.read_text() for p in EXAMPLE.iterdir() if p.is_file()}
    assert blocks == files


def test_the_file_is_as_short_as_it_is_said_to_be() -> None:
    assert len((EXAMPLE / "hisparse_knorm.py").read_text().splitlines()) <= 40


def test_every_check_has_a_row() -> None:
    rows = re.search(r"\| check \| .*?\n\|---\|---\|\n(.*?)\n\n", DOC, re.DOTALL)
    assert rows[1].splitlines() == [f"| {check.name} | {check.proves} |" for check in CHECKS]


def test_every_capability_has_a_row() -> None:
    rows = re.search(r"\| attribute \| .*?\n\|---\|---\|---\|\n(.*?)\n\n", DOC, re.DOTALL)[1]
    written = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", rows, re.MULTILINE))
    declared = [n for n, hint in BaseSparseAlgorithm.__annotations__.items() if "ClassVar" in hint]
    assert list(written) == [*declared, "query_window"]
    for name in declared:
        assert str(getattr(BaseSparseAlgorithm, name)).replace("'", '"') == written[name], name


def test_every_method_has_a_row() -> None:
    rows = re.search(r"\| method \| .*?\n\|---\|---\|\n(.*?)\n\n", DOC, re.DOTALL)[1]
    methods = [n for n, f in vars(BaseSparseAlgorithm).items() if callable(f) and n[0] != "_"]
    assert re.findall(r"^\| `(\w+)\(", rows, re.MULTILINE) == methods


@pytest.mark.slow
def test_the_comparison_prints_what_stands_under_it(tmp_path: Path) -> None:
    """Against a real model; figures may differ in the last digit from one machine to another."""
    fetch("smollm2-135m")
    line, printed = re.search(r"```\n\$ python compare.py (.*?)\n(.*?)```", DOC, re.DOTALL).groups()
    program = f"import hisparse_knorm, runpy; runpy.run_path({str(EXAMPLE / 'compare.py')!r})"
    done = subprocess.run(
        [sys.executable, "-c", program, *line.split()],
        env=os.environ | {"PYTHONPATH": str(EXAMPLE), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got, wanted = done.stdout.splitlines(), printed.splitlines()
    assert got[0] == wanted[0]
    found, written = (dict(x.split() for x in lines[1:]) for lines in (got, wanted))
    assert {k: float(v) for k, v in found.items()} == pytest.approx(
        {k: float(v) for k, v in written.items()}, rel=0.05
    )
