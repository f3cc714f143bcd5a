"""Which cases of served modes run in PART=sweeps, and which in PART=modes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["few"]


def few(names: Iterable[str], *usual: str) -> list[Any]:
    """Parameters of a test, of which sweeps run those of ``usual``, and PART=modes the others."""
    return [
        name if name in usual else pytest.param(name, marks=pytest.mark.modes) for name in names
    ]
