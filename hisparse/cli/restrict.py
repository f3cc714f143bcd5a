"""The flag ``--isa`` of the benchmarks: kernels and PyTorch for one instruction set."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable

from hisparse.kernels.build.isa import ISAS, check_isa, environment


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--isa`` to a command, which then runs in a process restricted to it."""
    parser.add_argument(
        "--isa",
        metavar="|".join(sorted(ISAS)),
        help="instruction set of the CPU kernels and of PyTorch (HISPARSE_CPU_ISA, else native)",
    )
    parser.set_defaults(run=functools.partial(_run, parser.get_default("run")))


def _run(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    if arguments.isa is not None:
        check_isa("--isa", arguments.isa)
        wanted = environment(arguments.isa, os.environ)
        if wanted != dict(os.environ):
            # PyTorch and its libraries read their limits when they are loaded: start again.
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
    return run(arguments)
