"""``hisparse doctor``: check this machine and its packages, and say how to fix what fails."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "check SGLang, its hooks, the device, memory and kernels, and say what to do"
    parser = commands.add_parser("doctor", help=text, description=f"{text} (exit code 1: an error)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.doctor import provenance, run_checks

    with Console(stderr=True).status("checking, about 10 seconds"):
        checks = run_checks()
    if arguments.json:
        found = {"command": "doctor", "machine": provenance.machine()}
        print(json.dumps(found | {"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for head in ("check", "status", "found"):
            table.add_column(head, overflow="fold")
        for check in checks:
            text = Text(check.message)
            if check.remedy:
                text.append(f"\n-> {check.remedy}", style="bold")
            table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), text)
        Console(highlight=False).print(table)
    return 1 if any(check.status == "error" for check in checks) else 0
