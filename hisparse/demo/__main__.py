"""Command line of the demo; ``make demo`` runs it."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from rich.console import Console
from transformers import AutoTokenizer

from hisparse.demo.compare import measure, print_report, server_setups
from hisparse.demo.document import HARBOUR, make_prompt
from hisparse.errors import HiSparseError
from hisparse.eval.models import load, resolve

#: Place of the planted sentence, from 0 (beginning) to 1 (end).
_DEPTH = 0.8


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hisparse.demo", description=__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="packaged model, folder or hub id (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    console = Console(markup=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        model = resolve(options.model, progress=lambda line: console.print(line, style="dim"))
        question = [{"role": "user", "content": make_prompt(HARBOUR, _DEPTH)}]
        prompt = load(AutoTokenizer, model).apply_chat_template(
            question, add_generation_prompt=True, return_dict=False
        )
        columns = [measure(x, model, prompt, options.threads, console) for x in server_setups()]
    except KeyboardInterrupt:
        console.print("\nstopped; no server is left running")
        return 128 + signal.SIGINT
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 1
    print_report(console, columns, len(prompt))
    return 0


if __name__ == "__main__":
    sys.exit(main())
