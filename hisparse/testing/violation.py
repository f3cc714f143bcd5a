"""A broken contract, as one line for the author of an algorithm."""

from __future__ import annotations

from hisparse.errors import AlgorithmError


class Violation(AlgorithmError):
    """An algorithm broke its contract.

    Args:
        findings: one line each: what was got, what was expected.
    """

    def __init__(self, *findings: str) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings
