"""``hisparse build``: compile the kernels ahead of time."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "compile the kernels ahead of time"
    parser = commands.add_parser("build", help=text, description=text)
    parser.add_argument(
        "--arch",
        default="",
        metavar="NAME[,NAME]",
        help="CUDA architectures, such as sm_80,sm_90 (this machine's GPU, if there is one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.kernels.build.ahead import build_all

    archs = [arch for arch in arguments.arch.split(",") if arch]
    for arch in archs:
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            raise ConfigError(f"--arch: got {arch!r}, expected names such as sm_80, sm_90, sm_100")
    start = time.perf_counter()
    built = build_all(archs)
    seconds = round(time.perf_counter() - start, 1)
    failed = {name: why for name, why in built.items() if not isinstance(why, Path)}
    if arguments.json:
        libraries = [
            {
                "name": name,
                "status": "error" if name in failed else "ok",
                "path": None if name in failed else str(what),
                "message": failed.get(name, ""),
            }
            for name, what in built.items()
        ]
        print(json.dumps({"command": "build", "seconds": seconds, "libraries": libraries}))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for name, what in built.items():
            console.print(f"{name}: {'not built: ' if name in failed else ''}{what}")
    return 1 if failed else 0
