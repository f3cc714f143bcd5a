"""How large tests are: small in ``make test``, exhaustive in ``make test-all PART=sweeps``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

T = TypeVar("T")

#: The part of ``make test-all`` that runs; empty in ``make test``.
PART = os.environ.get("PART", "")
SWEEPS = PART == "sweeps"
FAULTS = PART == "faults"
#: All cases of served modes.
MODES = PART == "modes"
#: Served modes: a case or two of each in sweeps.
MORE_SERVERS = SWEEPS or MODES


def sized(usual: T, swept: T) -> T:
    """The size for this run."""
    return swept if SWEEPS else usual


def crossed(
    names: str, first: Sequence[Any], second: Sequence[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Two parameters: each value of the longer one with one of the other; in sweeps all pairs.

    Args:
        names: of both, as ``pytest.mark.parametrize`` takes them.
        first, second: values, or results of ``pytest.param`` with an id.
    """
    length = max(len(first), len(second))
    pairs = [(first[i % len(first)], second[i % len(second)]) for i in range(length)]
    pairs = sized(pairs, [(one, other) for one in first for other in second])
    made = [[_param(value) for value in pair] for pair in pairs]
    cases = [
        pytest.param(*a.values, *b.values, id=f"{a.id}-{b.id}", marks=(*a.marks, *b.marks))
        for a, b in made
    ]

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        parametrized: Callable[..., None] = pytest.mark.parametrize(names, cases)(test)
        return pytest.mark.sweeps(parametrized)

    return mark


def _param(value: Any) -> ParameterSet:
    return value if isinstance(value, ParameterSet) else pytest.param(value, id=str(value))
