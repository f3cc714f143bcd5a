"""``hisparse algorithms``: what there is, with options."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = commands.add_parser("algorithms", help="list algorithms, built in and from plugins")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.algorithms import ALGORITHMS

    found = [_describe(name, ALGORITHMS.get(name)) for name in ALGORITHMS]
    if arguments.json:
        print(json.dumps({"command": "algorithms", "algorithms": found}, indent=2))
        return 0
    table = Table("name", "keeps", "scopes", "options")
    for entry in found:
        options = ", ".join(f"{k}={v}" for k, v in entry["options"].items()) or "none"
        table.add_row(entry["name"], entry["summary"], ", ".join(entry["scopes"]), options)
    Console().print(table)
    return 0


def _describe(name: str, cls: type) -> dict[str, Any]:
    options = {
        f.name: None if f.default is dataclasses.MISSING else f.default
        for f in dataclasses.fields(cls)
    }
    summary = (inspect.getdoc(cls) or "").partition("\n")[0]
    return {
        "name": name,
        "summary": summary,
        "scopes": list(getattr(cls, "scopes", ())),
        "options": options,
        "module": cls.__module__,
    }
