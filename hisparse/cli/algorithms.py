"""``hisparse algorithms``: list the algorithms, their limits and their options."""

import argparse
import dataclasses
import inspect
import json
from typing import Any, get_type_hints

from rich.console import Console

from hisparse.cli.terminal import add_command, print_paragraph, print_result


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "list the algorithms, built in and from plug-ins, with their options"
    add_command(commands, "algorithms", text, _run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.algorithms import ALGORITHMS

    found = [_describe(name, ALGORITHMS.get(name)) for name in ALGORITHMS]
    result = {"command": "algorithms", "algorithms": found}
    print_result(arguments, result, lambda console: _print(console, found))
    return 0


def _print(console: Console, found: list[dict[str, Any]]) -> None:
    for entry in found:
        console.print(f"[bold]{entry['name']}[/bold]")
        print_paragraph(console, entry["summary"], indent="  ")
        print_paragraph(console, f"selection scopes {', '.join(entry['scopes'])}", indent="  - ")
        for limit in entry["limits"]:
            print_paragraph(console, limit, indent="  - ")
        for name, option in entry["options"].items():
            default = json.dumps(option["default"])
            line = f"option {name}: {option['type']} (default {default})"
            print_paragraph(console, line, indent="  ", hanging=2)
        console.print()


def _describe(name: str, cls: type[Any]) -> dict[str, Any]:
    summary = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        "name": name,
        "summary": summary,
        "scopes": list(cls.scopes),
        "page_sizes": None if cls.page_sizes is None else list(cls.page_sizes),
        "variable_lengths": cls.variable_lengths,
        "limits": cls.limits(),
        "options": _options(cls),
        "module": cls.__module__,
    }


def _options(cls: type[Any]) -> dict[str, dict[str, Any]]:
    from hisparse.options import type_words

    hints = get_type_hints(cls)
    return {
        f.name: {
            "type": type_words(hints[f.name]),
            "default": None if f.default is dataclasses.MISSING else f.default,
        }
        for f in dataclasses.fields(cls)
    }
