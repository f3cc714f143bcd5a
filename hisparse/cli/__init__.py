"""The ``hisparse`` command: one module for each subcommand."""

import contextlib
import signal
import sys
from collections.abc import Sequence

from hisparse.cli import algorithms, bench, build, check, doctor, eval, kvcm, plan, storage, trace
from hisparse.cli.terminal import OneLineParser
from hisparse.errors import HiSparseError, one_line

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    An error is one line on standard error: code 2 for bad input, 1 for a file or a pipe that cannot
    be read or written, such as on a full disk.
    """
    parser = OneLineParser(prog="hisparse", description="Hierarchical sparse attention for SGLang.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (algorithms, bench, build, check, doctor, eval, kvcm, plan, storage, trace):
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    # A supervisor ends the command as Ctrl-C does: servers that a benchmark started are stopped.
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _leave)
    try:
        result: int = arguments.run(arguments)
        sys.stdout.flush()
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hisparse: error: {one_line(error)}", file=sys.stderr)
        _drop_output()
        return 1
    except KeyboardInterrupt:
        print("hisparse: interrupted", file=sys.stderr)
        return 130
    return result


def _leave(number: int, _: object) -> None:
    """End by a signal; more of them do not interrupt what still has to stop."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _drop_output() -> None:
    """Close standard output if it cannot be written: Python would report the error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
