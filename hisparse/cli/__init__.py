"""The ``hisparse`` command: one module for each subcommand."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from hisparse.cli import algorithms, bench, build, check, doctor, eval, plan
from hisparse.errors import HiSparseError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad input is one line on stderr and code 2."""
    parser = argparse.ArgumentParser(
        prog="hisparse", description="Hierarchical sparse attention for SGLang."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (algorithms, bench, build, check, doctor, eval, plan):
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    # A supervisor ends the command as Ctrl-C does: servers that a benchmark started are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        result: int = arguments.run(arguments)
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hisparse: interrupted", file=sys.stderr)
        return 130
    return result
