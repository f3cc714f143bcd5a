"""The contract suite for algorithms, and the simulated server that the suite runs them in.

    for result in run_checks(lambda: MyAlgorithm(beta=2.0)):
        assert result.status == "passed", result.message

``hisparse check my_module:MyAlgorithm`` does the same from the command line.
"""

from hisparse.testing.case import Case
from hisparse.testing.operations import Violation
from hisparse.testing.simulator import Request, Simulator
from hisparse.testing.suite import (
    CHECKS,
    Check,
    CheckResult,
    cases_of,
    report_class,
    run_check,
    run_checks,
)

__all__ = [
    "CHECKS", "Case", "Check", "CheckResult", "Request", "Simulator", "Violation", "cases_of",
    "report_class", "run_check", "run_checks",
]  # fmt: skip
