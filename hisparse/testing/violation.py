"""A broken contract, as one line for the author of an algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse.errors import AlgorithmError

__all__ = ["Violation", "shorten"]

#: Numbers of a list that a message shows.
_NUM_SHOWN = 16


class Violation(AlgorithmError):
    """An algorithm broke its contract.

    Args:
        findings: one line each: what was got, what was expected.
    """

    def __init__(self, *findings: str) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


def shorten(numbers: Sequence[int]) -> str:
    """The first 16 numbers of a list, for a message."""
    more = ", ..." if len(numbers) > _NUM_SHOWN else ""
    return f"[{', '.join(map(str, numbers[:_NUM_SHOWN]))}{more}]"
