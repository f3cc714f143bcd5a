"""``hisparse doctor``: check this machine and its packages, and say how to fix what fails."""

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from hisparse.cli.terminal import add_command, make_table, print_result

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "check SGLang, its hooks, the device, memory and kernels, and say what to do"
    add_command(commands, "doctor", f"{text} (exit code 1: an error)", _run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.doctor import provenance, run_checks

    with Console(stderr=True).status("checking, about 10 seconds"):
        checks = run_checks()

    def show(console: Console) -> None:
        table = make_table("check", "status", "found")
        for name, (status, message, remedy) in checks.items():
            text = Text(message)
            if remedy:
                text.append(f"\n-> {remedy}", style="bold")
            table.add_row(name, Text(status, style=_STYLES[status]), text)
        console.print(table)

    found = [{"name": name} | finding._asdict() for name, finding in checks.items()]
    result = {"command": "doctor", "machine": provenance.machine(), "checks": found}
    print_result(arguments, result, show)
    return 1 if any(finding.status == "error" for finding in checks.values()) else 0
