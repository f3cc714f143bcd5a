"""``hisparse bench serve``: throughput and latency under load, dense and sparse."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from hisparse.cli.arguments import names, number, numbers
from hisparse.cli.output import without_sglang_warnings
from hisparse.errors import ConfigError
from hisparse.eval.report import check_matplotlib


def add_parser(benches: Any) -> None:
    """Add the command to ``hisparse bench``."""
    text = "serve the same load with dense SGLang and with hisparse, at equal device memory"
    parser = benches.add_parser("serve", help=text, description=text)
    # Flags that are not given are not in the namespace: recipes and LoadOptions have the defaults.
    options = parser.add_argument_group("load", argument_default=argparse.SUPPRESS)
    _add_load_flags(options.add_argument)
    _add_server_flags(options.add_argument)
    add = parser.add_argument
    add("--recipe", metavar="NAME|FILE", help="a recipe; flags beside it replace its values")
    add("--plot", type=Path, metavar="FILE.svg", help="draw throughput and time per token")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _add_load_flags(add: Any) -> None:
    add("--context", type=numbers, metavar="N[,N]", help="tokens of the prompts (7000)")
    add("--output", type=number, metavar="N", help="tokens that each request generates (64)")
    add("--concurrency", type=numbers, metavar="N[,N]", help="most requests in flight (1)")
    add("--rate", type=_rates, metavar="X[,X]", help="requests per second, Poisson arrivals")
    add("--requests", type=number, metavar="N", help="requests of a load (2x concurrency)")
    add("--shared-prefix", type=_share, metavar="X", help="common share of the prompts (0)")
    add(
        "--turns", type=number, metavar="N", help="how often a prompt is sent, longer each time (1)"
    )
    add("--trace", metavar="FILE", help="requests of a trace, Mooncake's JSONL")
    add("--text", metavar="FILE", help="text of the prompts (two built-in texts)")
    add("--slo-ttft", metavar="TIME", help="limit of the time to first token, such as 2s")
    add("--slo-tpot", metavar="TIME", help="limit of the time per token, such as 100ms")
    add(
        "--no-quality",
        dest="quality",
        action="store_false",
        help="do not compare with dense decoding, which takes most of a short run; no ratios then",
    )


def _add_server_flags(add: Any) -> None:
    add("--model", metavar="PATH|HUB_ID|NAME", help="the model (smollm2-135m)")
    add("--device", metavar="NAME", help="cpu or cuda (cpu)")
    add(
        "--algorithm",
        type=names,
        metavar="NAME[,NAME]",
        help="contenders: dense, sglang-hisparse, algorithms of hisparse (dense,sketch)",
    )
    add("--budget", type=number, metavar="N", help="tokens attended per step (512)")
    add(
        "--device-buffer-size",
        type=numbers,
        metavar="N[,N]",
        help="tokens of a row's device buffer, which then does not grow, a contender each",
    )
    add(
        "--device-memory",
        type=names,
        metavar="SIZE[,SIZE]",
        help="device memory for the KV cache of each contender (all requests of the load, dense)",
    )
    add(
        "--dense-requests",
        type=numbers,
        metavar="N[,N]",
        help="the same as the KV cache of N dense requests",
    )
    add(
        "--url",
        type=names,
        metavar="URL[,URL]",
        help="running servers, whose radix caches are emptied; the first of two is dense",
    )
    add("--threads", type=number, metavar="N", help="threads of a server (one for each core)")


def _rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected rates above 0, such as 0.5,1,2")
    return found


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a share such as 0.5") from None


def _run(arguments: argparse.Namespace) -> int:
    from hisparse_bench.load.options import LoadOptions, read_recipe

    plot = arguments.plot
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot: got {str(plot)!r}, expected a name that ends with .svg")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot: got {str(plot)!r}, expected a file in a folder that exists")
    if plot is not None:
        check_matplotlib("--plot")
    given = vars(arguments)
    values = {name: given[name] for name in LoadOptions.__dataclass_fields__ if name in given}
    if arguments.recipe is None:
        return _measure(arguments, {}, [LoadOptions.read("bench serve", values)])
    recipe = read_recipe(arguments.recipe, values)
    return _measure(arguments, recipe.about, recipe.runs)


def _measure(arguments: argparse.Namespace, about: dict[str, str], runs: Sequence[Any]) -> int:
    from hisparse_bench.load.bench import LoadBench, Status
    from hisparse_bench.load.report import LoadReport

    started, benches, finished = time.monotonic(), [], False
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn()]
    console = Console(stderr=True)
    try:
        bar = Progress(*columns, console=console, disable=not console.is_terminal)
        with bar as progress, without_sglang_warnings():
            for i, options in enumerate(runs, 1):
                run = f"run {i} of {len(runs)}" if len(runs) > 1 else ""
                bench = LoadBench(options, Status(progress, run))
                benches.append(bench)
                bench.run()
        finished = True
    finally:
        # Ctrl-C and signals too: what was measured so far is not lost.
        cases = [case for bench in benches for case in bench.cases]
        if finished or cases:
            report = LoadReport(
                command="bench serve",
                device=benches[0].device,
                cases=cases,
                recipe=about,
                interrupted=not finished,
                seconds=round(time.monotonic() - started, 1),
            )
            if arguments.json:
                print(report.to_json(), flush=True)
            else:
                report.print_table(Console())
            if arguments.plot is not None:
                arguments.plot.write_text(report.to_svg(), encoding="utf-8")
    measured = any(case.results for case in cases)
    return 0 if measured and all(case.gate != "failed" for case in cases) else 1
