"""A broken contract, and an unexpected exception, as one line for the author of an algorithm."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from hisparse.errors import one_line

__all__ = ["Violation", "explain", "shorten"]

#: Numbers of a list that a message shows.
_NUM_SHOWN = 16


class Violation(Exception):
    """An algorithm broke its contract.

    Args:
        findings: one line each: what was got, what was expected.
    """

    def __init__(self, *findings: str) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


def explain(error: Exception, algorithm: type) -> str:
    """An exception and the line that raised it, if possible a line of the algorithm's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    source = getattr(sys.modules.get(algorithm.__module__), "__file__", None)
    frame = ([f for f in frames if f.filename == source] or frames)[-1]
    return f"{one_line(error)} ({Path(frame.filename).name}, line {frame.lineno})"


def shorten(numbers: Sequence[int]) -> str:
    """The first 16 numbers of a list, for a message."""
    more = ", ..." if len(numbers) > _NUM_SHOWN else ""
    return f"[{', '.join(map(str, numbers[:_NUM_SHOWN]))}{more}]"
