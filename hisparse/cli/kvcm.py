"""``hisparse kvcm``: a manager for caches that many servers share."""

from __future__ import annotations

from typing import Any

from hisparse.cli.terminal import add_command


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = add_command(commands, "kvcm", "a manager for caches that many servers share")
    parser.add_subparsers(dest="action", required=True, metavar="ACTION")
