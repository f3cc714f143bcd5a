"""The contract suite on every algorithm: built in, and of a package of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hisparse.algorithms import ALGORITHMS
from hisparse.testing import CheckResult, cases_of, run_checks

ROOT = Path(__file__).parents[2]


def not_passed(name: str) -> list[CheckResult]:
    return [r for r in run_checks(ALGORITHMS.get(name)) if r.status != "passed"]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_contract(name: str) -> None:
    assert not_passed(name) == []


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_cases_are_all_scopes_and_sizes(name: str) -> None:
    cls = ALGORITHMS.get(name)
    sizes = {1, 8, 16} if cls.page_sizes is None else {1, 8, 16} & {*cls.page_sizes}
    cases = {(case.scope, case.page_size) for case in cases_of(cls)}
    assert cases == {(scope, size) for scope in cls.scopes for size in sizes}


def test_contract_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's own test, as docs/write-an-algorithm.md has it."""
    doc = (ROOT / "docs" / "write-an-algorithm.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"In a test of your own:\n\n```python\n(.*?)```", doc, re.DOTALL)
    # What the package registers is forgotten again.
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(ROOT / "examples" / "hisparse-knorm")
    names: dict[str, object] = {}
    exec(block, names)
    names["test_contract"]()
    assert "knorm" in ALGORITHMS
