"""How large tests are: small in ``make test``, exhaustive in ``make test-all PART=sweeps``."""

from __future__ import annotations

import os
from typing import TypeVar

__all__ = ["MODES", "PART", "SWEEPS", "sized"]

T = TypeVar("T")

#: The part of ``make test-all`` that runs; empty in ``make test``.
PART = os.environ.get("PART", "")
SWEEPS = PART == "sweeps"
#: Served modes that take minutes.
MODES = PART == "modes"


def sized(usual: T, swept: T) -> T:
    """The size for this run."""
    return swept if SWEEPS else usual
