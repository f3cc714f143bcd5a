"""``hisparse eval``: what sparse attention costs on a real model."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hisparse import provenance
from hisparse.errors import ConfigError

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = commands.add_parser("eval", help="what sparse attention costs on a real model")
    add = parser.add_argument
    add("--model", default="smollm2-135m", metavar="PATH|HUB_ID|NAME")
    add("--algorithm", type=_names, default=["oracle", "quest", "streaming"], metavar="NAME[,NAME]")
    add("--budget", type=_numbers, default=[256], metavar="N[,N]", help="tokens")
    add("--config", action="append", default=[], metavar="JSON", help="a whole configuration")
    add("--context", type=_numbers, default=[4096], metavar="N[,N]", help="tokens")
    add("--seeds", type=int, default=1, help="documents of each text and length")
    add("--text", action="append", type=Path, default=[], metavar="FILE", help="in place of ours")
    add("--out", type=Path, default=Path("hisparse-eval"), help="records; a run goes on from them")
    add("--report", type=Path, metavar="FILE", help="also write a Markdown page")
    add("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_run)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers such as 4096 or 256,512")
    return found


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.eval import Evaluation, make_cells, make_summary, parse_methods
    from hisparse.eval.report import to_markdown

    methods = parse_methods(arguments.algorithm, arguments.budget, arguments.config)
    if arguments.seeds < 1:
        raise ConfigError(f"--seeds: got {arguments.seeds}, expected at least 1")
    texts = {"texts": {file.stem: _read(file) for file in arguments.text}} if arguments.text else {}
    model, tokenizer, folder = _load(arguments.model)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("")
        records = Evaluation(
            model=model,
            tokenizer=tokenizer,
            methods=methods,
            contexts=arguments.context,
            seeds=arguments.seeds,
            folder=arguments.out / Path(folder).name,
            progress=lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
            **texts,
        ).run()
    result = {
        "command": "eval",
        "line": shlex.join(["hisparse", *sys.argv[1:]]),
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "model": arguments.model,
        "context": arguments.context,
        "cells": make_cells(records),
        "summary": make_summary(records),
    }
    if arguments.report is not None:
        arguments.report.write_text(to_markdown(result), encoding="utf-8")
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print_tables(result)
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"--text: cannot read {str(file)!r}: {reason}") from None


def _load(name: str) -> tuple[Any, Any, str]:
    import torch

    from hisparse.models import resolve

    folder = resolve(name, progress=lambda line: print(line, file=sys.stderr))
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ConfigError(
            "hisparse eval needs transformers: pip install 'hisparse[transformers]'"
        ) from None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    if torch.cuda.is_available():
        model = model.cuda()
    return model, AutoTokenizer.from_pretrained(folder), folder


def _print_tables(result: dict[str, Any]) -> None:
    from hisparse.eval.report import COLUMNS, describe

    console = Console()
    scores = Table("method", title="Questions answered right, all tokens")
    tasks = sorted({cell["task"] for cell in result["cells"]})
    for task in tasks:
        scores.add_column(task, justify="right")
    rows: dict[str, dict[str, str]] = {}
    for cell in result["cells"]:
        row = rows.setdefault(describe(cell), {})
        shown = f"{100 * cell['score']:.0f} ({100 * cell['low']:.0f}-{100 * cell['high']:.0f})"
        # What the dense model cannot do says nothing about sparse attention.
        row[cell["task"]] = shown if cell["usable"] else f"[dim]{shown}[/dim]"
    for name, row in rows.items():
        scores.add_row(name, *(row[task] for task in tasks))
    console.print(scores)
    names = [name for name in COLUMNS if name != "kept_p95"]
    summary = Table("method", *(COLUMNS[name] for name in names), "bytes")
    for line in result["summary"]:
        values = ("-" if line[name] is None else f"{line[name]:.3g}" for name in names)
        summary.add_row(describe(line), *values, f"{line['bytes_per_token']:,.0f}")
    console.print(summary)
    console.print(
        "Percent with 95% intervals; dim: the dense model itself is below 90%. kl: nats from "
        "dense. ppl: of the text that follows. copy: perplexity of passages that stood earlier. "
        "mass: attention kept. recall: of the best pages. kept: tokens a step. overlap: of "
        "adjacent steps. bytes: device memory a token, beside K and V."
    )
