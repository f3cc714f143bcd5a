"""Each planted fault is found by the checks that target it, and by no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.testing import CHECKS, Case, CheckResult, cases_of, run_check, run_checks
from hisparse.testing.check_declarations import find_class_faults
from tests.command import Command
from tests.testing import faulty_algorithms
from tests.testing.faulty_algorithms import Right
from tests.testing.faulty_state import FAULTS


def failed(cls: type[BaseSparseAlgorithm]) -> dict[str, CheckResult]:
    cases = [Case.of(cls, "kv_head", 8)] if cls.scopes else None
    return {r.name: r for r in run_checks(cls, cases) if r.status == "failed"}


def test_nothing_is_wrong_with_what_faults_are_planted_in() -> None:
    assert failed(Right) == {}


@pytest.mark.parametrize("cls", FAULTS, ids=lambda cls: cls.__name__)
def test_a_planted_fault_is_found(cls: type[BaseSparseAlgorithm]) -> None:
    found = failed(cls)
    assert set(found) == FAULTS[cls], found
    for result in found.values():
        assert "\n" not in result.message


def test_every_check_finds_something() -> None:
    assert {check.name for check in CHECKS} == set().union(*FAULTS.values())


def test_a_fault_is_shown_in_the_smallest_case_that_has_it() -> None:
    (check,) = (c for c in CHECKS if c.name == "runs")
    result = run_check(check, cases_of(faulty_algorithms.SelectsTheTailPage))
    assert result.cases == 0
    assert result.message.startswith("layer 0, request 0, head 0: got a selection of pages [0, ")
    assert result.message.endswith("expected ascending pages below 14, then -1")
    assert "page size 1, 14 prompt tokens, budget 13 tokens" in result.case


def test_an_exception_is_shown_with_its_line() -> None:
    (check,) = (c for c in CHECKS if c.name == "runs")
    result = run_check(check, [Case.of(faulty_algorithms.Raises, "layer", 8)])
    assert result.message.startswith("KeyError: 'not there' (faulty_algorithms.py, line ")


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module ``mine`` in it."""
    source = Path(faulty_algorithms.__file__).read_text()
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_on_a_right_algorithm(in_a_folder: Path, command: Command) -> None:
    sizes = "from mine import Right\n\nclass Pages(Right):\n    "
    sizes += '"""With one page size."""\n    page_sizes = (8,)\n'
    (in_a_folder / "sizes.py").write_text(sizes)
    found = command.json("check", "sizes:Pages", "--options", '{"weight": 2.5}')
    assert (found["command"], found["algorithm"], found["passed"]) == ("check", "sizes:Pages", True)
    assert found["options"] == {"weight": 2.5}
    assert [c["name"] for c in found["checks"]] == [c.name for c in CHECKS]
    assert {c["status"] for c in found["checks"]} == {"passed"}
    assert [c["cases"] for c in found["checks"]] == [1 if c.once else 3 for c in CHECKS]


@pytest.mark.usefixtures("in_a_folder")
def test_the_command_on_a_wrong_algorithm(command: Command) -> None:
    out = command("check", "mine:GivesPagesAsInt64", code=1)
    assert out.count("not run") == len(CHECKS) - 3
    finding = " ".join(out.partition("runs:\n")[2].split())
    said = "- GivesPagesAsInt64 (mine), layer 0, retrieve_topk: got Selection([3, 2, 12] int64"
    assert finding.startswith(said)
    assert "smallest failing case: selection scope kv_head, page size 1, 14 prompt" in finding


_UNDECLARED = """
from dataclasses import dataclass
from hisparse.algorithms import PageScoreAlgorithm
from mine import Right

@dataclass(frozen=True, kw_only=True)
class Wrong(Right):
    scopes = "kv_head"
    ranks_tail = "yes"
    top: int = 3

class Incomplete(PageScoreAlgorithm):
    page_sizes = 16
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "Wrong",
            {
                "scopes: got 'kv_head', expected tuple[typing.Literal['layer'",
                "ranks_tail: got 'yes', expected bool",
                "option top: got no error for -2147483648",
            },
        ),
        (
            "Incomplete",
            {
                "Incomplete: got no dataclass",
                "Incomplete: got no method score",
                "Incomplete: got no method summarize",
                "Incomplete: got no method summary_shape",
                "page_sizes: got 16, expected tuple[int, ...] | None",
            },
        ),
    ],
)
def test_all_missing_declarations_are_reported_at_once_and_nothing_else_is_run(
    name: str,
    expected: set[str],
    in_a_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    (in_a_folder / "undeclared.py").write_text(_UNDECLARED)
    monkeypatch.setattr(Case, "serve", lambda *_, **__: pytest.fail("a forward pass was run"))
    checks = command.json("check", f"undeclared:{name}", code=1)["checks"]
    assert [check["name"] for check in checks] == [check.name for check in CHECKS]
    findings = [
        line for check in checks if check["status"] == "failed" for line in check["findings"]
    ]
    assert len(findings) == len(expected)
    for start in expected:
        assert any(line.startswith(start) for line in findings), (start, findings)
    assert {check["status"] for check in checks[2:]} == {"not run"}
    shown = " ".join(command("check", f"undeclared:{name}", code=1).split())
    assert "checks were not run: fix these findings first" in shown
    for start in expected:
        assert f"- {start}" in shown


def test_an_option_without_a_decorator_is_reported() -> None:
    class Undecorated(Right):
        """Keeps nothing."""

        gain: float = 2.0

    (fault,) = find_class_faults(Undecorated)
    assert fault.startswith("option gain: got no @dataclass on Undecorated itself")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["mine:Wright"], "module mine has no Wright"),
        (["mine:FAULTS"], "expected a class that extends PageScoreAlgorithm"),
        (["broken:Right"], "cannot import broken: ModuleNotFoundError: No module named 'no_such"),
        (["qest"], "unknown algorithm 'qest'; did you mean 'quest'"),
        (["mine:Right", "--options", "{"], "--options: not JSON at line 1 column 2"),
        (["mine:Right", "--options", "[1]"], "--options: got [1] (list), expected an object"),
        (["mine:Right", "--options", '{"wait": 1}'], "unknown Right option 'wait'"),
        (["mine:Right", "--options", '{"weight": -1}'], "weight: got -1, expected a number above"),
    ],
)
@pytest.mark.usefixtures("in_a_folder")
def test_what_cannot_be_checked(argv: list[str], expected: str, command: Command) -> None:
    assert expected in command.refused("check", *argv)
