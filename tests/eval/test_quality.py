"""The quality of every built-in algorithm on a real model, against what was committed.

``make test-all PART=sweeps`` runs what ``smollm2-1k-small.json`` holds: one document, and passages
of it.
``make test-all PART=quality`` runs what ``smollm2-1k.json`` holds: all documents and tasks. Both
files are what an evaluation printed with ``--json``. To make them again, in the project's root:

    eval="hisparse eval --model smollm2-135m --context 1024 --budget 128 --json \\
        --algorithm oracle,sketch,quest,dipr,snapkv,streaming"
    $eval > tests/eval/smollm2-1k.json
    $eval --text hisparse/eval/texts/moby_dick.txt --tasks copy > tests/eval/smollm2-1k-small.json
"""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli import main
from tests.sizes import PART

ROOT = Path(__file__).parents[2]
FILE = "smollm2-1k.json" if PART == "quality" else "smollm2-1k-small.json"
COMMITTED = json.loads((Path(__file__).parent / FILE).read_text(encoding="utf-8"))
#: Fewer questions than these say nothing of a score.
ENOUGH = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sweeps,
    pytest.mark.skipif(not PART, reason="takes minutes: make test-all PART=sweeps"),
]

Result = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The committed command line, run again with records in an empty folder."""
    folder = tmp_path_factory.mktemp("eval")
    line = shlex.split(COMMITTED["line"])[1:]
    with pytest.MonkeyPatch.context() as patch, open(folder / "out.json", "w") as out:
        patch.setattr("sys.stdout", out)
        patch.chdir(ROOT)
        assert main([*line, "--out", str(folder / "records")]) == 0
    result: Result = json.loads((folder / "out.json").read_text())
    return result


def worse(found: Result, committed: Result) -> list[str]:
    """What is worse than the committed interval, in words."""
    complaints = []
    lines = {line["method"]: line for line in found["summary"]}
    dense = (
        lines["dense"]["ppl"],
        next(line["ppl"] for line in committed["summary"] if line["method"] == "dense"),
    )
    if abs(dense[0] / dense[1] - 1) > 0.01:
        complaints.append(f"dense: ppl {dense[0]:.4g}, committed {dense[1]:.4g}: other documents")
    for line in committed["summary"]:
        for figure in ("kl", "ppl_ratio", "copy_ppl_ratio"):
            got, (_, high) = lines[line["method"]][figure], line["intervals"][figure]
            # Dense attention is at its bounds: what is left is rounding.
            if got > high + 1e-3:
                complaints.append(f"{line['method']}: {figure} {got:.4g}, at most {high:.4g}")
    cells = {(cell["method"], cell["task"]): cell for cell in found["cells"]}
    for cell in committed["cells"]:
        got = cells[cell["method"], cell["task"]]["score"]
        if cell["n"] >= ENOUGH and got < cell["low"]:
            complaints.append(
                f"{cell['method']}: {cell['task']} {got:.2g}, at least {cell['low']:.2g}"
            )
    return complaints


def test_no_method_is_worse_than_what_was_committed(found: Result) -> None:
    assert worse(found, COMMITTED) == []


def test_an_algorithm_that_is_no_better_than_a_window_would_be_noticed(found: Result) -> None:
    names = {line["method"] for line in COMMITTED["summary"]}
    for name in names & {"oracle", "sketch", "quest", "dipr"}:
        broken = copy.deepcopy(found)
        for kind in ("summary", "cells"):
            window = [x for x in broken[kind] if x["method"] == "streaming"]
            kept = [x for x in broken[kind] if x["method"] != name]
            broken[kind] = [*kept, *(x | {"method": name} for x in window)]
        assert any(text.startswith(f"{name}: ") for text in worse(broken, COMMITTED))


def test_the_order_of_methods(found: Result) -> None:
    """What every table of this project rests on: a ceiling, a floor, and methods in between."""
    kl = {line["method"]: line["kl"] for line in found["summary"]}
    assert kl["oracle"] < kl["quest"] < kl["streaming"]
    assert kl["sketch"] < kl["quest"]
