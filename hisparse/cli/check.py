"""``hisparse check``: run the contract suite on an algorithm, registered or not."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm
from hisparse.cli.terminal import (
    add_command,
    add_flag,
    make_table,
    print_paragraph,
    print_result,
    progress_bar,
    string,
)
from hisparse.errors import ConfigError, one_line
from hisparse.options import from_options, parse_object
from hisparse.testing import CHECKS, CheckResult, report_class, run_checks

_STYLES = {"passed": "green", "failed": "red"}

_FIX_FIRST = "fix these findings first, then run the command again"


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "check that an algorithm keeps the contract of hisparse"
    parser = add_command(commands, "check", text, _run)
    parser.add_argument(
        "algorithm",
        metavar="MODULE:CLASS",
        help="a class in a module of the current folder or of an installed package, or the name "
        "of a registered algorithm",
    )
    text = "the options of the algorithm, such as '{\"beta\": 2.0}'"
    add_flag(parser, "--options", string, text, "{}", metavar="JSON")


def _run(arguments: argparse.Namespace) -> int:
    cls = _load(arguments.algorithm)
    options = parse_object(arguments.options, "--options", '{"beta": 2.0}')

    def make() -> BaseSparseAlgorithm:
        return from_options(cls, cls.__name__, "algorithm_config", options)

    try:
        make()
    except ConfigError:
        if not (results := report_class(cls)):
            raise
    except Exception as error:
        if not (results := report_class(cls)):
            raise ConfigError(
                f"{arguments.algorithm}: cannot make an instance: {one_line(error)}; "
                "expected a class that --options can fill"
            ) from error
    else:
        results = _run_checks(make)
    passed = all(result.status == "passed" for result in results)
    found = {
        "command": "check",
        "algorithm": arguments.algorithm,
        "options": options,
        "passed": passed,
        "checks": [asdict(result) | {"message": result.message} for result in results],
    }
    print_result(arguments, found, lambda console: _print(console, arguments.algorithm, results))
    return 0 if passed else 1


def _run_checks(make: Callable[[], BaseSparseAlgorithm]) -> list[CheckResult]:
    """Run the suite and show the check under way on standard error."""
    results: list[CheckResult] = []
    with progress_bar() as bar:
        task = bar.add_task(CHECKS[0].name, total=len(CHECKS))
        for check, result in zip([*CHECKS[1:], None], run_checks(make), strict=True):
            results.append(result)
            bar.update(task, advance=1, description=check.name if check else "done")
    return results


def _load(name: str) -> type[BaseSparseAlgorithm]:
    """The class with a registered name, or at ``module:Class``."""
    module_name, colon, class_name = name.partition(":")
    if not colon:
        return ALGORITHMS.get(name)
    # For a script, Python searches the folder of the script, not the current one.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except AttributeError:
        raise ConfigError(
            f"{name}: module {module_name} has no {class_name or 'class of that name'}; expected "
            "MODULE:CLASS, such as my_module:MyAlgorithm"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{name}: cannot import {module_name}: {one_line(error)}; expected a module of the "
            "current folder or of an installed package"
        ) from error
    if not (isinstance(found, type) and issubclass(found, BaseSparseAlgorithm)):
        raise ConfigError(
            f"{name}: got {found!r}, expected a class that extends PageScoreAlgorithm or "
            "BaseSparseAlgorithm"
        )
    return found


def _print(console: Console, name: str, results: Sequence[CheckResult]) -> None:
    failed = [result for result in results if result.status == "failed"]
    served = [x for check, x in zip(CHECKS, results, strict=True) if not check.once]
    if all(result.status == "not run" for result in served):
        _print_findings(console, failed)
        count = sum(result.status == "not run" for result in results)
        print_paragraph(console, f"{name}: {count} checks were not run: {_FIX_FIRST}")
        return
    table = make_table("check", "result", "cases", "property", right=("cases",), title=name)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for check, result in zip(CHECKS, results, strict=True):
        status = Text(result.status, style=_STYLES.get(result.status, "yellow"))
        table.add_row(check.name, status, str(result.cases), check.description)
    console.print(table)
    _print_findings(console, failed)


def _print_findings(console: Console, results: Sequence[CheckResult]) -> None:
    for result in results:
        console.print(f"{result.name}:")
        for finding in result.findings:
            print_paragraph(console, finding, indent="  - ")
        if result.case:
            print_paragraph(console, f"smallest failing case: {result.case}", indent="    ")
        console.print()
