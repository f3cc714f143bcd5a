"""The contract suite: named checks that every algorithm has to pass, wherever it comes from."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.errors import one_line
from hisparse.testing import check_decode_path as decode_path
from hisparse.testing import check_options, check_representations, check_requests, check_selections
from hisparse.testing.case import Case
from hisparse.testing.recorder import Violation

__all__ = ["CHECKS", "Check", "CheckResult", "cases_of", "run_check", "run_checks"]

_PAGE_SIZES = (1, 8, 16)


@dataclass(frozen=True)
class Check:
    """A property that an algorithm must have.

    Attributes:
        name: of the check.
        run: raises :class:`~hisparse.testing.Violation` where a case lacks the property.
        once: whether it does not depend on scope and page size.
    """

    name: str
    run: Callable[[Case], None]
    once: bool = False

    @property
    def proves(self) -> str:
        """The property, in a sentence."""
        return " ".join((self.run.__doc__ or "").partition("\n\n")[0].split())


#: In the order in which they are run; if "runs" fails, those behind it have nothing to look at.
CHECKS: tuple[Check, ...] = (
    Check("declarations", check_options.declarations, once=True),
    Check("options", check_options.options, once=True),
    Check("runs", check_selections.runs),
    Check("well formed", check_selections.well_formed),
    Check("sinks and recents", check_selections.sinks_and_recents),
    Check("budget", check_selections.budget),
    Check("dense", check_selections.dense),
    Check("batch order", check_requests.batch_order),
    Check("other requests", check_requests.other_requests),
    Check("reused slot", check_requests.reused_slot),
    Check("shared prefix", check_requests.shared_prefix),
    Check("chunks", check_representations.chunks),
    Check("decoded pages", check_representations.decoded_pages),
    Check("writes", check_representations.writes),
    Check("inputs untouched", check_representations.inputs_untouched),
    Check("no syncs", decode_path.no_syncs),
    Check("no loops", decode_path.no_loops),
    Check("allocations", decode_path.allocations),
    Check("replays", decode_path.replays),
)


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        check: its name.
        status: "passed", "failed" or "not run".
        num_cases: cases that passed.
        message: for a check that failed: what was got, what was expected.
        case: the smallest case that was found to fail.
    """

    check: str
    status: str
    num_cases: int
    message: str = ""
    case: str = ""


def cases_of(make: Callable[[], BaseSparseAlgorithm]) -> list[Case]:
    """Every scope that an algorithm declares, with page sizes 1, 8 and 16 where it can do them."""
    algorithm = make()
    can = algorithm.page_sizes
    sizes: Sequence[int] = _PAGE_SIZES
    if can is not None:
        sizes = [size for size in _PAGE_SIZES if size in can] or sorted(can)[:2]
    return [Case.of(make, scope, size) for size in sizes for scope in algorithm.scopes]


def run_check(check: Check, cases: Sequence[Case]) -> CheckResult:
    """One check on its cases; the first that fails is made smaller while it goes on failing."""
    for done, case in enumerate(cases[:1] if check.once else cases):
        message = _fault(check, case)
        if message:
            for smaller in case.smaller():
                again = _fault(check, smaller)
                if again:
                    message, case = again, smaller
                    break
            return CheckResult(check.name, "failed", done, message, "" if check.once else str(case))
    return CheckResult(check.name, "passed", 1 if check.once else len(cases))


def run_checks(
    make: Callable[[], BaseSparseAlgorithm], cases: Sequence[Case] | None = None
) -> Iterator[CheckResult]:
    """All checks, one after the other.

    Args:
        make: a new instance of the algorithm with the options to check; its class serves.
        cases: None: :func:`cases_of` it.
    """
    usable = True
    if cases is None:
        try:
            cases = cases_of(make)
        except Exception:
            cases = []
        usable = bool(cases)
    for check in CHECKS:
        if not usable and not check.once:
            yield CheckResult(check.name, "not run", 0)
            continue
        # Without a case, what the class declares cannot be read: the first check says why.
        result = run_check(check, cases or [Case.of(make, "layer", 8)])
        usable = usable and not (check.name == "runs" and result.status == "failed")
        yield result


def _fault(check: Check, case: Case) -> str:
    """What is wrong with a case; nothing if all is well."""
    try:
        check.run(case)
    except Violation as violation:
        return str(violation)
    except Exception as error:
        return _explain(error, type(case.make()))
    return ""


def _explain(error: Exception, algorithm: type[BaseSparseAlgorithm]) -> str:
    """An exception, and the line that it comes from: one of the algorithm's own file if it can."""
    frames = traceback.extract_tb(error.__traceback__)
    source = getattr(sys.modules.get(algorithm.__module__), "__file__", None)
    frame = ([f for f in frames if f.filename == source] or frames)[-1]
    return f"{one_line(error)} ({Path(frame.filename).name}, line {frame.lineno})"
