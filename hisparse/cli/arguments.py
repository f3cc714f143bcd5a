"""The parser of the command line, kinds of its values, and the flag ``--isa`` of the benchmarks."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from hisparse.kernels.build.isa import ISAS, check_isa, environment

#: Characters of a message, which may quote what was given.
_MOST: Final = 1000


class OneLineParser(argparse.ArgumentParser):
    """Prints an error as commands print theirs, without the usage; so do its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and how to see the flags, and exit with code 2."""
        message = "\\n".join(message.removeprefix("argument ").splitlines())
        if len(message) > _MOST:
            message = f"{message[: _MOST // 2]} ... {message[-_MOST // 2 :]}"
        self.exit(2, f"hisparse: error: {message}; see {self.prog} --help\n")


def names(text: str) -> list[str]:
    """``"quest,sketch"`` -> ``["quest", "sketch"]``."""
    return [name for name in text.split(",") if name]


def number(text: str) -> int:
    """``"64"`` -> 64.

    Raises:
        ArgumentTypeError: the value is no number, or is below 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of at least 1")
    return int(text)


def numbers(text: str) -> list[int]:
    """``"256,512"`` -> ``[256, 512]``.

    Raises:
        ArgumentTypeError: a value is no number, or is below 1.
    """
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected numbers of at least 1, such as 4096 or 256,512"
        )
    return found


def ratios(text: str) -> list[float]:
    """``"0.85,1"`` -> ``[0.85, 1.0]``.

    Raises:
        ArgumentTypeError: a value is no number, or is not from 0 to 1.
    """
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= ratio <= 1 for ratio in found):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected fractions from 0 to 1, such as 0.9 or 0.85,1"
        )
    return found


def add_isa_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--isa`` to a command, which then runs in a process restricted to it."""
    parser.add_argument(
        "--isa",
        metavar="|".join(sorted(ISAS)),
        help="instruction set of the CPU kernels and of PyTorch (HISPARSE_CPU_ISA, else native)",
    )
    parser.set_defaults(run=functools.partial(_run_restricted, parser.get_default("run")))


def _run_restricted(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    if arguments.isa is not None:
        check_isa("--isa", arguments.isa)
        wanted = environment(arguments.isa, os.environ)
        if wanted != dict(os.environ):
            # PyTorch and its libraries read their limits when they are loaded: start again.
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
    return run(arguments)
