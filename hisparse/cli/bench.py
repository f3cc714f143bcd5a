"""``hisparse bench``: measure speed; no time is shown unless a correctness check passed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli import bench_serve
from hisparse.cli.arguments import add_isa_flag, number
from hisparse.cli.output import without_sglang_warnings
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.options import read_text
from hisparse_bench.options import Options
from hisparse_bench.report import Case, Report


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
    _add_kernel_parsers(benches)
    for bench in benches.choices.values():
        add_isa_flag(bench)


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
    return show(report, as_json=arguments.json)


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


#: Sizes of each benchmark: the flag, its default and its help.
_LRU_DIFF = {
    "rows": (8, "rows of the batch"),
    "width": (2048, "pages of a selection"),
    "slots": (4096, "device slots of a row"),
    "overlap": (0.85, "fraction of a selection that the next one keeps"),
}
_TRANSFER = {
    "pool-bytes": (4 << 30, "size of the host pool, bytes"),
    "page-bytes": (4096, "size of the keys of a page, bytes; its values are as large"),
    "pages": (2048, "pages moved in one step"),
}
_SWAP_IN = {
    "batch": (1, "requests"),
    "width": (2048, "tokens of a selection"),
    "slots": (4096, "tokens of a row's device buffer"),
    "misses": (0.15, "fraction of a selection that is not resident"),
    "row-bytes": (1152, "size of the latent of a token, bytes"),
    "pool-bytes": (1 << 30, "least size of the host pool, bytes"),
}
_DECODE = {
    "context": (32768, "tokens of each request"),
    "budget": (2048, "tokens attended per step"),
    "misses": (0.15, "fraction of the selected pages that is not resident"),
    "batch": (1, "requests"),
    "layers": (2, "layers of the model"),
    "q-heads": (32, "query heads"),
    "kv-heads": (8, "KV heads"),
    "head-dim": (128, "width of a head"),
    "page-size": (16, "tokens of a page"),
}
_MODEL = {name: _DECODE[name] for name in ("q-heads", "kv-heads", "head-dim", "page-size")}
_STEP = {
    "context": (8192, "tokens of each request"),
    "budget": (1024, "tokens attended per step"),
    "batch": (1, "requests"),
    "layers": (4, "layers of the model"),
    "reuse-layers": (2, "layers that share a selection"),
} | _MODEL
_KERNELS = {
    "context": (32768, "tokens whose pages are scored"),
    "budget": (2048, "tokens attended"),
    "footprint": (1024, "MiB of all copies of a kernel's inputs, at least"),
} | _MODEL
_PREFILL = {
    "context": (8192, "tokens of the prefix"),
    "chunk": (512, "tokens of the chunk"),
    "tile": (2048, "tokens of the prefix that are staged at a time"),
    "layers": (4, "layers of the model"),
} | _MODEL


def _add_kernel_parsers(benches: Any) -> None:
    """Add the kernel benchmarks to ``hisparse bench``."""
    _add(benches, "lru-diff", "find hits, choose victims and list the pages to load", _LRU_DIFF)
    _add(benches, "transfer", "gather scattered pages from a large host pool", _TRANSFER)
    _add(benches, "swap-in", "bring the missing pages of a selection to the device", _SWAP_IN)
    decode = _add(benches, "decode", "attention of one layer, with selection and swap-in", _DECODE)
    step = _add(benches, "step", "a decode step of several layers, with and without overlap", _STEP)
    prefill = _add(benches, "prefill", "a chunk over a prefix, with and without overlap", _PREFILL)
    text = "CPU kernels against the processor's limits: multiply-adds and memory"
    _add(benches, "kernels", text, _KERNELS)
    for parser in (decode, step, prefill):
        help_text = "dtype of K and V (float32)"
        parser.add_argument("--dtype", default="float32", metavar="NAME", help=help_text)
    for parser in (decode, step):
        name = HiSparseConfig.algorithm
        help_text = f"the algorithm, any registered one ({name})"
        parser.add_argument("--algorithm", default=name, metavar="NAME", help=help_text)


def _add(
    benches: Any, name: str, text: str, flags: dict[str, tuple[Any, str]]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benches.add_parser(name, help=text, description=text)
    for flag, (default, what) in flags.items():
        kind = type(default)
        options = {"type": kind, "default": default, "metavar": "N" if kind is int else "X"}
        parser.add_argument(f"--{flag}", help=f"{what} ({default})", **options)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (cpu)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="timed steps (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    sizes = [flag.replace("-", "_") for flag in flags]
    parser.set_defaults(run=lambda arguments: _run(name, sizes, arguments))
    return parser


def _run(name: str, sizes: Sequence[str], arguments: argparse.Namespace) -> int:
    from hisparse.errors import ConfigError
    from hisparse_bench.options import device_of, dtype_of

    if arguments.steps < 1:
        raise ConfigError(f"--steps: got {arguments.steps}, expected 1 or more")
    values = {size: getattr(arguments, size) for size in sizes}
    for size, value in values.items():
        if value < 0 or (value == 0 and isinstance(value, int)):
            flag = "--" + size.replace("_", "-")
            raise ConfigError(f"{flag}: got {value}, expected more than 0")
    if hasattr(arguments, "dtype"):
        values["dtype"] = dtype_of(arguments.dtype)
    if hasattr(arguments, "algorithm"):
        values["algorithm"] = arguments.algorithm
    options = Options(
        device=device_of(arguments.device), num_steps=arguments.steps, seed=arguments.seed
    )
    make = _limits if name == "kernels" else _one_case
    with Console(stderr=True).status(f"bench {name}"), without_sglang_warnings():
        report = make(name, values, options)
    return show(report, as_json=arguments.json)


def _one_case(name: str, values: dict[str, Any], options: Options) -> Report:
    case = _bench(name)(**values).run(options)
    return Report(command=f"bench {name}", device=options.device.type, cases=[case])


def _limits(name: str, values: dict[str, Any], options: Options) -> Report:
    from hisparse_bench.kernels import KernelsBench, KernelsReport

    cases = KernelsBench(**values).run(options)
    return KernelsReport(command=f"bench {name}", device=options.device.type, cases=cases)


def _bench(name: str) -> Callable[..., Any]:
    from hisparse_bench.decode import DecodeBench
    from hisparse_bench.overlap import PrefillBench, StepBench
    from hisparse_bench.residency import LruDiffBench, SwapInBench, TransferBench

    return {
        "lru-diff": LruDiffBench,
        "transfer": TransferBench,
        "swap-in": SwapInBench,
        "decode": DecodeBench,
        "step": StepBench,
        "prefill": PrefillBench,
    }[name]


def show(report: Report, *, as_json: bool) -> int:
    """Print a report and return the exit code: 0 if every correctness check passed, else 1."""
    if as_json:
        print(report.to_json())
    else:
        report.print_table(Console())
    return 0 if all(_passed(case) for case in report.cases) else 1


def _passed(case: Case) -> bool:
    return case.gate == "passed"
