"""``hisparse bench``: measure speed; no time is shown unless a correctness check passed."""

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from rich.console import Console

from hisparse.cli.terminal import (
    Values,
    add_command,
    add_flag,
    integer,
    names,
    number,
    numbers,
    progress_bar,
    ratio,
    string,
    without_sglang_warnings,
)
from hisparse_bench.decode import DecodeBench
from hisparse_bench.kernels import KernelsBench, KernelsReport
from hisparse_bench.load.options import LoadOptions, read_recipe
from hisparse_bench.options import Options, device_of, dtype_of, flags_of
from hisparse_bench.report import Report
from hisparse_bench.residency import DiffTablesBench, SwapInBench, TransferBench

#: Benchmarks of kernels and of parts of a step; the fields of a class are its flags.
_BENCHES: Final[dict[str, tuple[type[Any], str]]] = {
    "diff-tables": (DiffTablesBench, "find hits, choose victims, list pages to attend and to load"),
    "transfer": (TransferBench, "gather scattered pages from a large host pool"),
    "swap-in": (SwapInBench, "bring the missing pages of a selection to the device"),
    "decode": (DecodeBench, "attention of one layer, with selection and swap-in"),
    "kernels": (
        KernelsBench,
        "CPU kernels against the processor's limits: multiply-adds and memory",
    ),
}
#: How the values of a flag are read, by the type of the field that it sets.
_KINDS: Final[dict[Any, Values]] = {
    int: number,
    float: ratio,
    tuple[int, ...]: numbers,
    tuple[float, ...]: Values(
        float, "rates above 0, such as 0.5,1,2", "X", lambda x: 0 < x < float("inf")
    ),
    tuple[str, ...]: names,
}


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = add_command(
        commands, "bench", "measure speed; times are shown only if the results are correct"
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    _add_serve(benches)
    for name, (bench, text) in _BENCHES.items():
        each = add_command(benches, name, text, functools.partial(_run, name, bench))
        for flag, hint, default, meaning in flags_of(bench):
            shown = "float32" if hint is torch.dtype else default
            add_flag(each, f"--{flag}", _KINDS.get(hint, string), meaning, shown)
        add_flag(each, "--device", string, "cpu or cuda", "cpu")
        add_flag(each, "--steps", number, "timed steps", 60)
        add_flag(each, "--seed", integer, "seed of the inputs", 0)


def _run(name: str, bench: type[Any], arguments: argparse.Namespace) -> int:
    flags = (flag.replace("-", "_") for flag, *_ in flags_of(bench))
    values = {flag: getattr(arguments, flag) for flag in flags}
    if "dtype" in values:
        values["dtype"] = dtype_of(values["dtype"])
    options = Options(
        device=device_of(arguments.device), num_steps=arguments.steps, seed=arguments.seed
    )
    with Console(stderr=True).status(f"bench {name}"), without_sglang_warnings():
        found = bench(**values).run(options)
    report, cases = (KernelsReport, found) if name == "kernels" else (Report, [found])
    device = options.device.type
    return _show(arguments, report(command=f"bench {name}", device=device, cases=cases))


def _show(arguments: argparse.Namespace, report: Report) -> int:
    """Print a report and return the exit code: 0 if every correctness check passed, else 1."""
    if arguments.json:
        print(report.to_json(), flush=True)
    else:
        report.print_table(Console())
    return 0 if all(case.gate == "passed" for case in report.cases) else 1


def _add_serve(benches: Any) -> None:
    # A flag that was not given leaves the value of the recipe, or of LoadOptions.
    text = "serve the same load with dense SGLang and with hisparse, at equal device memory"
    parser = add_command(benches, "serve", text, _run_serve)
    load = parser.add_argument_group("load")
    for flag, hint, default, meaning in flags_of(LoadOptions):
        kind = _KINDS.get(hint, string)
        if hint is not bool:
            add_flag(load, f"--{flag}", kind, meaning, default, suppress=True)
    load.add_argument(
        "--no-quality",
        dest="quality",
        action="store_false",
        default=argparse.SUPPRESS,
        help="do not compare with dense decoding, which takes most of a short run; no ratios then",
    )
    text = "a recipe; flags beside it replace its values"
    add_flag(parser, "--recipe", string, text, metavar="NAME|FILE")


def _run_serve(arguments: argparse.Namespace) -> int:
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
    try:
        with progress_bar() as progress, without_sglang_warnings():
            for i, options in enumerate(runs, 1):
                run = f"run {i} of {len(runs)}" if len(runs) > 1 else ""
                bench = LoadBench(options, Status(progress, run))
                benches.append(bench)
                bench.run()
        finished = True
    finally:
        # Also after Ctrl-C and signals: finished measurements are kept.
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
            _show(arguments, report)
    measured = any(case.results for case in cases)
    return 0 if measured and all(case.gate != "failed" for case in cases) else 1
