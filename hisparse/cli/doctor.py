"""``hisparse doctor``: check this machine and its packages, and say how to fix what fails."""

from __future__ import annotations

import argparse
from dataclasses import asdict
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
        for check in checks:
            text = Text(check.message)
            if check.remedy:
                text.append(f"\n-> {check.remedy}", style="bold")
            table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), text)
        console.print(table)

    found = {"machine": provenance.machine(), "checks": [asdict(check) for check in checks]}
    print_result(arguments, {"command": "doctor"} | found, show)
    return 1 if any(check.status == "error" for check in checks) else 0
