"""``hisparse build``: compile the kernels ahead of time."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli.terminal import add_command, add_flag, names, print_result
from hisparse.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = add_command(commands, "build", "compile the kernels ahead of time", _run)
    text = "CUDA architectures, such as sm_80,sm_90 (this machine's GPU, if there is one)"
    add_flag(parser, "--arch", names, text, [])


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.kernels.build.ahead import build_all

    for arch in arguments.arch:
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            raise ConfigError(f"--arch: got {arch!r}, expected names such as sm_80, sm_90, sm_100")
    start = time.perf_counter()
    built = build_all(arguments.arch)
    failed = {name: why for name, why in built.items() if not isinstance(why, Path)}
    libraries = [
        {
            "name": name,
            "status": "error" if name in failed else "ok",
            "path": None if name in failed else str(what),
            "message": failed.get(name, ""),
        }
        for name, what in built.items()
    ]

    def show(console: Console) -> None:
        for name, what in built.items():
            line = f"{name}: {'not built: ' if name in failed else ''}{what}"
            console.print(line, soft_wrap=True)

    seconds = round(time.perf_counter() - start, 1)
    print_result(arguments, {"command": "build", "seconds": seconds, "libraries": libraries}, show)
    return 1 if failed else 0
