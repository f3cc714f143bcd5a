"""``hisparse bench``: measure speed; no time is shown unless a correctness check passed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli import bench_serve, kernel_benches, restrict
from hisparse.cli.lists import number
from hisparse.cli.output import without_sglang_warnings
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.options import read_text


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "measure speed; times are shown only if the results are correct"
    parser = commands.add_parser("bench", help=text, description=text)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    bench_serve.add_parser(benches)
    text = "pages that a decode step waits for, with and without prefetch"
    prefetch = benches.add_parser("prefetch", help=text, description=text)
    _add_model_flags(prefetch, context=2048, budget=256)
    add = prefetch.add_argument
    default = HiSparseConfig.algorithm
    add("--algorithm", default=default, metavar="NAME", help=f"the algorithm ({default})")
    add(
        "--min-cosine",
        type=_cosines,
        default=[0.8, 0.9],
        metavar="X[,X]",
        help="values of the prefetch option min_cosine (0.8,0.9)",
    )
    add("--steps", type=number, default=64, metavar="N", help="decode steps (64)")
    prefetch.set_defaults(run=_run_prefetch)
    kernel_benches.add_parsers(benches)
    for bench in benches.choices.values():
        restrict.add_flag(bench)


def _add_model_flags(parser: argparse.ArgumentParser, *, context: int, budget: int) -> None:
    """Add the flags of benchmarks that run a real model on a real text."""
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        metavar="PATH|HUB_ID|NAME",
        help="the model (smollm2-135m)",
    )
    add(
        "--context",
        type=number,
        default=context,
        metavar="N",
        help=f"tokens of the prompt ({context})",
    )
    add(
        "--budget",
        type=number,
        default=budget,
        metavar="N",
        help=f"tokens attended per step ({budget})",
    )
    add("--text", type=Path, metavar="FILE", help="text of the prompt (the demo's document)")
    add("--json", action="store_true", help="print one JSON object instead")


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

    folder = models.resolve(arguments.model)
    bench = PrefetchBench(
        model=models.load(AutoModelForCausalLM, folder).eval(),
        ids=_prompt(folder, arguments.text, arguments.context + arguments.steps + WARMUPS),
        context=arguments.context,
        budget=arguments.budget,
        algorithm=arguments.algorithm,
        min_cosines=arguments.min_cosine,
        num_steps=arguments.steps,
    )
    with Console(stderr=True).status("bench prefetch"), without_sglang_warnings():
        case = bench.run()
    report = Report(command="bench prefetch", device="cpu", cases=[case])
    return kernel_benches.show(report, as_json=arguments.json)


def _prompt(model: str, text: Path | None, num_tokens: int) -> list[int]:
    """The first ``num_tokens`` token ids of a text.

    Raises:
        ConfigError: the text cannot be read or is shorter.
    """
    from transformers import AutoTokenizer

    from hisparse.demo import document
    from hisparse.eval.models import load

    words = document.text() if text is None else read_text(text, "--text")
    ids: list[int] = load(AutoTokenizer, model)(words)["input_ids"]
    if len(ids) < num_tokens:
        raise ConfigError(
            f"--context: got {num_tokens}, the text has {len(ids)} tokens; give a longer --text"
        )
    return ids[:num_tokens]
