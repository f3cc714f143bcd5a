"""The contract suite on every algorithm: built in, and of a package of its own.

``make test`` runs each check with every scope and every page size; ``make test-all PART=sweeps``
with all combinations of the two.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hisparse.algorithms import ALGORITHMS
from hisparse.testing import Case, cases_of, run_checks
from tests.sizes import SWEEPS

ROOT = Path(__file__).parents[2]


def chosen_cases(name: str) -> list[Case]:
    """Cases that include every scope and every page size of an algorithm; sweeps run all cases."""
    cases = cases_of(ALGORITHMS.get(name))
    if SWEEPS:
        return cases
    found = {(case.scope, case.page_size): case for case in cases}
    scopes, sizes = (list(dict.fromkeys(kind)) for kind in zip(*found, strict=True))
    num = max(len(scopes), len(sizes))
    return [found[scopes[i % len(scopes)], sizes[i % len(sizes)]] for i in range(num)]


@pytest.mark.sweeps
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_contract(name: str) -> None:
    cases = chosen_cases(name)
    results = list(run_checks(ALGORITHMS.get(name), cases))
    assert [r for r in results if r.status != "passed"] == []
    assert {r.cases for r in results} <= {1, len(cases)}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_cases_are_all_scopes_and_sizes(name: str) -> None:
    cls = ALGORITHMS.get(name)
    sizes = {1, 8, 16} if cls.page_sizes is None else {1, 8, 16} & {*cls.page_sizes}
    cases = {(case.scope, case.page_size) for case in cases_of(cls)}
    assert cases == {(scope, size) for scope in cls.scopes for size in sizes}


def test_contract_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the example in docs/write-an-algorithm.md."""
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
