"""The ``hisparse`` command."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from hisparse.cli import algorithms, bench, build, check, doctor, eval, plan
from hisparse.errors import HiSparseError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(prog="hisparse", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (algorithms, bench, build, check, doctor, eval, plan):
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    # Ended by a supervisor, as by Ctrl-C: the servers that a benchmark started are stopped.
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
