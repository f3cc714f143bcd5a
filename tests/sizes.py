"""How large tests are: small in ``make test``, exhaustive in ``make test-all PART=sweeps``."""

from __future__ import annotations

import os
from typing import TypeVar

__all__ = ["MODES", "MORE_SERVERS", "PART", "SWEEPS", "sized"]

T = TypeVar("T")

#: The part of ``make test-all`` that runs; empty in ``make test``.
PART = os.environ.get("PART", "")
SWEEPS = PART == "sweeps"
#: All cases of served modes.
MODES = PART == "modes"
#: Served modes: a case or two of each in sweeps.
MORE_SERVERS = SWEEPS or MODES


def sized(usual: T, swept: T) -> T:
    """The size for this run."""
    return swept if SWEEPS else usual
