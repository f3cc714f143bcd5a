"""Command line of the demo; ``make demo`` runs it."""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
from rich.console import Console

from hisparse.demo.compare import measure, print_report, server_setups
from hisparse.errors import HiSparseError
from hisparse.eval.models import resolve


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hisparse.demo", description=__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="packaged model, folder or hub id (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        model = resolve(options.model, progress=lambda line: console.print(line, style="dim"))
        dense, sparse = (measure(x, model, options.threads, console) for x in server_setups())
    except KeyboardInterrupt:
        console.print("\nstopped; no server is left running")
        return 128 + signal.SIGINT
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 1
    print_report(console, dense, sparse, on_cpu=not torch.cuda.is_available())
    return 0


if __name__ == "__main__":
    sys.exit(main())
