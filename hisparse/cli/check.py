"""``hisparse check``: the contract suite on an algorithm from anywhere."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hisparse.errors import ConfigError, one_line

if TYPE_CHECKING:
    from hisparse.algorithms import BaseSparseAlgorithm
    from hisparse.testing import CheckResult

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = commands.add_parser("check", help="run the contract suite on an algorithm")
    parser.add_argument("algorithm", metavar="MODULE:CLASS", help="or the name of a registered one")
    parser.add_argument("--options", default="{}", help="the algorithm's options, a JSON object")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.options import from_options
    from hisparse.testing import CHECKS, run_checks

    cls, options = _load(arguments.algorithm), _parse(arguments.options)
    name = cls.__name__

    def make() -> BaseSparseAlgorithm:
        return from_options(cls, name, "algorithm_config", options)

    try:
        make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{arguments.algorithm}: cannot be made: {one_line(error)}") from error
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"checking {name}", total=len(CHECKS))
        for result in run_checks(make):
            results.append(result)
            progress.advance(task)
    passed = all(result.status == "passed" for result in results)
    if arguments.json:
        print(json.dumps(_as_json(arguments.algorithm, options, results, passed), indent=2))
    else:
        _print(arguments.algorithm, results)
    return 0 if passed else 1


def _load(name: str) -> type[BaseSparseAlgorithm]:
    """The class that ``module:Class`` or a registered name stands for."""
    from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm

    module_name, colon, class_name = name.partition(":")
    if not colon:
        return ALGORITHMS.get(name)
    # The command's own folder, not the caller's, is what Python puts there for a script.
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
        raise ConfigError(f"{name}: cannot import {module_name}: {one_line(error)}") from error
    if not (isinstance(found, type) and issubclass(found, BaseSparseAlgorithm)):
        raise ConfigError(
            f"{name}: got {found!r}, expected a class that extends PageScoreAlgorithm or "
            "BaseSparseAlgorithm"
        )
    if not dataclasses.is_dataclass(found):
        raise ConfigError(
            f"{name}: {class_name} is no dataclass; expected @dataclass(frozen=True, kw_only=True) "
            "before it"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{name}: {class_name} does not have {', '.join(missing)}")
    return found


def _parse(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--options: not JSON at column {error.colno}: {error.msg}; expected an object such "
            'as {"beta": 2.0}'
        ) from None
    if not isinstance(options, dict):
        raise ConfigError(f'--options: got {text}, expected an object such as {{"beta": 2.0}}')
    return options


def _as_json(
    name: str, options: dict[str, Any], results: Sequence[CheckResult], passed: bool
) -> dict[str, Any]:
    return {
        "command": "check",
        "algorithm": name,
        "options": options,
        "passed": passed,
        "checks": [
            {
                "name": result.check,
                "status": result.status,
                "cases": result.num_cases,
                "message": result.message,
                "case": result.case,
            }
            for result in results
        ],
    }


def _print(name: str, results: Sequence[CheckResult]) -> None:
    from hisparse.testing import CHECKS

    table = Table("check", "what it is about", "result", "cases", title=name)
    colours = {"passed": "green", "failed": "red"}
    for check, result in zip(CHECKS, results, strict=True):
        colour = colours.get(result.status, "yellow")
        status = f"[{colour}]{result.status}[/{colour}]"
        table.add_row(check.name, check.proves, status, str(result.num_cases))
    console = Console()
    console.print(table)
    for result in results:
        if result.message:
            console.print(f"\n{result.check}: {result.message}", markup=False, highlight=False)
        if result.case:
            console.print(f"smallest case: {result.case}", markup=False, highlight=False)
