"""``hisparse build``: compile the kernels ahead of time."""

import argparse
import re
import time
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
    libraries = [
        {
            "name": name,
            "status": "error" if why_not else "ok",
            "path": None if why_not else str(path),
            "message": why_not,
        }
        for name, (path, why_not) in built.items()
    ]

    def show(console: Console) -> None:
        for name, (path, why_not) in built.items():
            console.print(f"{name}: {f'not built: {why_not}' if why_not else path}", soft_wrap=True)

    seconds = round(time.perf_counter() - start, 1)
    print_result(arguments, {"command": "build", "seconds": seconds, "libraries": libraries}, show)
    return 1 if any(x.why_not for x in built.values()) else 0
