"""The contract suite: named checks that every algorithm has to pass, wherever it comes from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.errors import AlgorithmError, explain
from hisparse.testing import check_declarations, check_decode, check_state
from hisparse.testing.case import Case
from hisparse.testing.operations import Violation

_PAGE_SIZES = (1, 8, 16)

_NOT_DECLARED = "fix the declarations and options first"

_DOES_NOT_RUN = 'the check "runs" has to pass first'


@dataclass(frozen=True)
class Check:
    """A property that an algorithm must have.

    Attributes:
        name: of the check.
        run: raises :class:`~hisparse.testing.Violation` if the algorithm lacks the property in a
            case.
        once: whether one case is enough, because neither scope nor page size matters.
    """

    name: str
    run: Callable[[Case], None]
    once: bool = False

    @property
    def description(self) -> str:
        """The property, in a sentence."""
        return " ".join((self.run.__doc__ or "").partition("\n\n")[0].split())


#: In the order in which they are run. The checks after "options" need both checks before them to
#: pass, and the checks after "runs" need that one to pass too.
CHECKS: tuple[Check, ...] = (
    Check("declarations", check_declarations.declarations, once=True),
    Check("options", check_declarations.options, once=True),
    Check("runs", check_decode.runs),
    Check("scores", check_decode.scores),
    Check("sinks and recents", check_decode.sinks_and_recents),
    Check("dense", check_decode.dense),
    Check("batch order", check_state.batch_order),
    Check("other requests", check_state.other_requests),
    Check("reused slot", check_state.reused_slot),
    Check("shared prefix", check_state.shared_prefix),
    Check("chunks", check_state.chunks),
    Check("decoded pages", check_state.decoded_pages),
    Check("writes", check_state.writes),
    Check("inputs untouched", check_state.inputs_untouched),
    Check("no syncs", check_decode.no_syncs),
    Check("no loops", check_decode.no_loops),
    Check("allocations", check_decode.allocations),
    Check("replays", check_decode.replays),
)


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check.

    Attributes:
        name: of the check.
        status: "passed", "failed" or "not run".
        cases: number of cases that passed.
        findings: of a check that failed, one line each: what was got, what was expected; of a check
            that was not run, the reason.
        case: the smallest case that was found to fail.
    """

    name: str
    status: str
    cases: int
    findings: tuple[str, ...] = ()
    case: str = ""

    @property
    def message(self) -> str:
        """All findings in one line."""
        return "; ".join(self.findings)


def cases_of(make: Callable[[], BaseSparseAlgorithm]) -> list[Case]:
    """Every scope that an algorithm declares, with page sizes 1, 8 and 16 if it supports them."""
    algorithm = make()
    supported = algorithm.page_sizes
    sizes: Sequence[int] = _PAGE_SIZES
    if supported is not None:
        sizes = [size for size in _PAGE_SIZES if size in supported] or sorted(supported)[:2]
    return [Case.of(make, scope, size) for size in sizes for scope in algorithm.scopes]


def run_check(check: Check, cases: Sequence[Case]) -> CheckResult:
    """Run one check on its cases.

    The first case that fails is replaced by the smallest one that still fails.
    """
    for passed, case in enumerate(cases[:1] if check.once else cases):
        findings = _run(check, case)
        if findings:
            for smaller in case.smaller():
                again = _run(check, smaller)
                if again:
                    findings, case = again, smaller
                    break
            shown = "" if check.once else str(case)
            return CheckResult(check.name, "failed", passed, findings, shown)
    return CheckResult(check.name, "passed", 1 if check.once else len(cases))


def run_checks(
    make: Callable[[], BaseSparseAlgorithm], cases: Sequence[Case] | None = None
) -> Iterator[CheckResult]:
    """Run all checks, one after the other, and yield each result as soon as it is known.

    Declarations and options come first and take no time. If one of the two fails, no other check
    is run.

    Args:
        make: returns a new instance of the algorithm with the options to check; a class will do.
        cases: the cases to check; None: :func:`cases_of` the algorithm.
    """
    if cases is None:
        try:
            cases = cases_of(make)
        except Exception:
            # The declarations cannot be read: the first check says why.
            cases = []
    reason = ""
    for check in CHECKS:
        if reason and not check.once:
            yield CheckResult(check.name, "not run", 0, (reason,))
            continue
        result = run_check(check, cases or [Case.of(make, "layer", 8)])
        if result.status == "failed" and check.once:
            reason = _NOT_DECLARED
        elif result.status == "failed" and check.name == "runs":
            reason = _DOES_NOT_RUN
        yield result


def report_class(cls: type[BaseSparseAlgorithm]) -> list[CheckResult]:
    """Results for a class that cannot be instantiated; empty if its declarations are right."""
    faults = tuple(check_declarations.find_class_faults(cls))
    if not faults:
        return []
    first, *others = CHECKS
    not_run = [CheckResult(check.name, "not run", 0, (_NOT_DECLARED,)) for check in others]
    return [CheckResult(first.name, "failed", 0, faults), *not_run]


def _run(check: Check, case: Case) -> tuple[str, ...]:
    """The faults of an algorithm in one case."""
    try:
        check.run(case)
    except Violation as violation:
        return violation.findings
    except AlgorithmError as error:
        # The cause names the algorithm; the message of the engine names the recorder.
        cause = error.__cause__
        return (explain(cause, type(case.make())) if cause else str(error),)
    except Exception as error:
        return (explain(error, type(case.make())),)
    return ()
