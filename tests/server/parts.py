"""Which cases run in ``make test``, which in PART=sweeps, and which only in PART=modes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.sizes import MORE_SERVERS

#: Beside what ``make test`` runs: PART=sweeps, and what is also marked ``modes`` in PART=modes.
MORE = [
    pytest.mark.sweeps,
    pytest.mark.skipif(not MORE_SERVERS, reason="more servers: make test-all PART=sweeps"),
]


def more(test: Any) -> Any:
    """A test with the marks of :data:`MORE`."""
    for mark in MORE:
        test = mark(test)
    return test


def few(names: Iterable[str], *usual: str, others: Any = pytest.mark.modes) -> list[Any]:
    """Parameters of a test.

    Args:
        names: all of them.
        usual: those without marks of their own.
        others: marks of the others; by default PART=modes runs them, and sweeps do not.
    """
    return [name if name in usual else pytest.param(name, marks=others) for name in names]
