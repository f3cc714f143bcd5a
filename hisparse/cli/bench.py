"""``hisparse bench``: speed, shown only beside a passed correctness check."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli import kernel_benches
from hisparse.errors import ConfigError

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = commands.add_parser("bench", help="measure speed")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    serve = benches.add_parser("serve", help="one long request through the real SGLang server")
    serve.add_argument("--model", default="smollm2-135m", help="name, folder or hub id")
    serve.add_argument("--context", type=int, default=7000, help="tokens of the prompt")
    serve.add_argument("--budget", type=int, default=512, help="tokens attended per step")
    serve.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    serve.add_argument("--repeats", type=int, default=3, help="timed requests of each server")
    serve.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    serve.add_argument(
        "--text", type=Path, help="file to take the prompt from; the demo's document"
    )
    serve.add_argument("--json", action="store_true", help="one JSON object on standard output")
    serve.set_defaults(run=_run_serve)
    _add_prefetch(benches)
    kernel_benches.add_parsers(benches)


def _add_prefetch(benches: Any) -> None:
    parser = benches.add_parser(
        "prefetch", help="pages that a decode step waits for, with and without prefetch"
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="name, folder or hub id")
    add("--context", type=int, default=2048, help="tokens before the first step")
    add("--budget", type=int, default=256, help="tokens attended per step")
    add("--algorithm", default="quest", help="name")
    add("--min-cosine", type=_cosines, default=[0.8, 0.9], metavar="X[,X]", help="of prefetch")
    add("--steps", type=int, default=64, help="tokens to read")
    add("--text", type=Path, help="file to read; the demo's document")
    add("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_run_prefetch)


def _cosines(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected cosines such as 0.9 or 0.8,0.9"
        ) from None


def _run_prefetch(arguments: argparse.Namespace) -> int:
    from transformers import AutoModelForCausalLM

    from hisparse.eval import models
    from hisparse_bench.prefetch import WARMUPS, PrefetchBench
    from hisparse_bench.report import Report

    if arguments.steps < 1:
        raise ConfigError(f"--steps: got {arguments.steps}, expected 1 or more")
    folder = models.resolve(arguments.model)
    bench = PrefetchBench(
        model=AutoModelForCausalLM.from_pretrained(folder).eval(),
        ids=_prompt(folder, arguments.text, arguments.context + arguments.steps + WARMUPS),
        context=arguments.context,
        budget=arguments.budget,
        algorithm=arguments.algorithm,
        min_cosines=arguments.min_cosine,
        num_steps=arguments.steps,
    )
    with Console(stderr=True).status("bench prefetch"):
        case = bench.run()
    report = Report(command="bench prefetch", device="cpu", cases=[case])
    return kernel_benches.show(report, as_json=arguments.json)


def _run_serve(arguments: argparse.Namespace) -> int:
    from hisparse.eval import models
    from hisparse_bench.serve import ServeBench

    console = Console(stderr=True)
    model = models.resolve(arguments.model)
    report = ServeBench(
        model=model,
        prompt=_prompt(model, arguments.text, arguments.context),
        budget=arguments.budget,
        num_tokens=arguments.tokens,
        repeats=arguments.repeats,
        num_threads=arguments.threads,
    ).run(console)
    return kernel_benches.show(report, as_json=arguments.json)


def _prompt(model: str, text: Path | None, num_tokens: int) -> list[int]:
    """The first tokens of a real text."""
    from transformers import AutoTokenizer

    from hisparse.demo import document

    ids: list[int] = AutoTokenizer.from_pretrained(model)(
        document.text() if text is None else text.read_text()
    )["input_ids"]
    if len(ids) < num_tokens:
        raise ConfigError(
            f"--context: got {num_tokens}, the text has {len(ids)} tokens; give a longer --text"
        )
    return ids[:num_tokens]
