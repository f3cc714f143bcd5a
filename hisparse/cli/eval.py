"""``hisparse eval``: measure what sparse attention costs in quality on a real model."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from hisparse.cli.arguments import names, numbers
from hisparse.cli.output import make_table, print_figures, print_paragraph
from hisparse.config import HiSparseConfig
from hisparse.doctor import provenance
from hisparse.errors import ConfigError
from hisparse.eval import TASKS, Evaluation, Method, make_cells, make_summary, parse_methods
from hisparse.eval.models import MODELS, load, resolve
from hisparse.eval.report import check_reports, read_result, write_reports
from hisparse.eval.tables import Cell, make_short_tables
from hisparse.options import read_text

#: The ceiling, the default and the floor.
_ALGORITHMS = ["oracle", HiSparseConfig.algorithm, "streaming"]
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "measure what sparse attention costs in quality on a real model"
    parser = commands.add_parser("eval", help=text, description=text)
    _add_methods(parser)
    _add_documents(parser)
    _add_results(parser)
    parser.set_defaults(run=_run)


def _add_methods(parser: argparse.ArgumentParser) -> None:
    """The model, and what is compared on it."""
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        metavar="PATH|HUB_ID|NAME",
        help="the model (smollm2-135m)",
    )
    add(
        "--algorithm",
        type=names,
        default=_ALGORITHMS,
        metavar="NAME[,NAME]",
        help=f"algorithms ({','.join(_ALGORITHMS)})",
    )
    add(
        "--budget",
        type=numbers,
        default=[256],
        metavar="N[,N]",
        help="tokens attended per step (256)",
    )
    add(
        "--config",
        action="append",
        default=[],
        metavar="JSON",
        help="a whole --hisparse-config, as JSON or @FILE; may be given more than once",
    )
    add("--dtype", choices=_DTYPES, default="auto", help="dtype of the model (auto: its own)")


def _add_documents(parser: argparse.ArgumentParser) -> None:
    """What the model reads and is asked."""
    add = parser.add_argument
    add(
        "--context",
        type=numbers,
        default=[4096],
        metavar="N[,N]",
        help="tokens of a document (4096)",
    )
    add(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="documents of each text and length (1)",
    )
    add(
        "--text",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="read documents from this file instead of the built-in texts; may be repeated",
    )
    add(
        "--tasks",
        type=names,
        metavar="NAME[,NAME]",
        help="only these of the built-in tasks, or tasks of lm-eval instead",
    )
    add("--limit", type=int, metavar="N", help="documents of each task of lm-eval (all)")


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("hisparse-eval"),
        metavar="FOLDER",
        help="where records are kept; an interrupted run continues from them (hisparse-eval)",
    )
    add(
        "--report",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="also write the tables and plots as FILE.md or FILE.html",
    )
    add(
        "--from",
        action="append",
        type=Path,
        default=[],
        dest="saved",
        metavar="RESULT.json",
        help="evaluate nothing: write --report from the output of earlier runs with --json",
    )
    add("--json", action="store_true", help="print one JSON object instead")


def _run(arguments: argparse.Namespace) -> int:
    check_reports(arguments.report)
    if arguments.saved:
        return _report_saved(arguments)
    methods = parse_methods(arguments.algorithm, arguments.budget, arguments.config)
    if arguments.seeds < 1:
        raise ConfigError(f"--seeds: got {arguments.seeds}, expected at least 1")
    tasks = arguments.tasks or TASKS
    if others := [name for name in tasks if name not in TASKS]:
        if len(others) < len(tasks):
            raise ConfigError(
                f"--tasks: got {', '.join(tasks)}, expected some of {', '.join(TASKS)}, or names "
                "of lm-eval alone"
            )
        return _run_tasks(arguments, methods)
    if arguments.limit is not None:
        raise ConfigError(
            f"--limit: got {arguments.limit} without --tasks, expected tasks of lm-eval with it"
        )
    _check_different("--context", arguments.context)
    _check_different("--text", [file.stem for file in arguments.text])
    given = {file.stem: read_text(file, "--text") for file in arguments.text}
    texts = {"texts": given} if given else {}
    model, tokenizer, folder = _load(arguments.model, arguments.dtype)
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
            tasks=tasks,
            progress=lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
            **texts,
        ).run()
    result = _origin(arguments) | {
        "dtype": str(model.dtype).removeprefix("torch."),
        "cells": make_cells(records),
        "summary": make_summary(records),
    }
    write_reports(arguments.report, [result], result["line"])
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print_tables(result)
    return 0


def _run_tasks(arguments: argparse.Namespace, methods: Sequence[Method]) -> int:
    """Run tasks of lm-eval. Their documents are fetched before the model is loaded."""
    if arguments.report:
        raise ConfigError("--tasks: got --report, which shows our own tasks; expected --json")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit: got {arguments.limit}, expected at least 1")
    try:
        from hisparse.eval.lm_eval_run import load_tasks, run_tasks
    except ImportError as error:
        raise ConfigError(
            f"--tasks: got {', '.join(arguments.tasks)}, expected some of {', '.join(TASKS)}; for "
            f"others {error.name} is not installed: pip install 'hisparse[lm-eval]'"
        ) from None
    tasks = load_tasks(
        arguments.tasks, tokenizer=_find(arguments.model), contexts=arguments.context
    )
    model, tokenizer, _ = _load(arguments.model, arguments.dtype)
    scores = run_tasks(
        model,
        tokenizer,
        methods,
        tasks,
        limit=arguments.limit,
        progress=lambda method: print(f"hisparse: {method}", file=sys.stderr),
    )
    if arguments.json:
        print(json.dumps(_origin(arguments) | {"tasks": scores}, indent=2))
        return 0
    figures = ("budget", "score", "stderr", "n", "selections")
    heads = ("method", "budget", "task", "metric", "score", "stderr", "n", "selections")
    table = make_table(*heads, right=figures)
    for line in scores:
        shown = ("-" if line[head] is None else line[head] for head in heads)
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in shown))
    Console().print(table)
    return 0


def _origin(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command line, machine, versions and model of a result."""
    return {
        "command": "eval",
        "line": _line(),
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "model": arguments.model,
        "model_source": MODELS[arguments.model].source if arguments.model in MODELS else None,
        "context": arguments.context,
    }


def _line() -> str:
    return shlex.join(["hisparse", *sys.argv[1:]])


def _report_saved(arguments: argparse.Namespace) -> int:
    """Write reports from the JSON output of earlier runs."""
    if not arguments.report or arguments.json:
        got = "--json" if arguments.json else "no --report"
        raise ConfigError(
            f"--from: got {got}, expected --report FILE.md or FILE.html, and no --json"
        )
    results = [read_result(file) for file in arguments.saved]
    write_reports(arguments.report, results, _line())
    return 0


def _check_different(flag: str, names: Sequence[object]) -> None:
    """Refuse a value that is given twice: the same documents would count twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag}: got {name} more than once, expected it once")


def _find(name: str) -> str:
    """The folder of a model; the model is fetched if need be."""
    return resolve(name, progress=lambda line: print(line, file=sys.stderr))


def _load(name: str, dtype: str) -> tuple[Any, Any, str]:
    import torch

    folder = _find(name)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ConfigError(
            "hisparse eval needs transformers: pip install 'hisparse[eval]'"
        ) from None
    model = load(AutoModelForCausalLM, folder, dtype=dtype).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    return model, load(AutoTokenizer, folder), folder


def _print_tables(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for table in make_short_tables(result):
        console.print(f"\n[bold]{table.title}[/bold]")
        print_figures(
            console, table.heads, [[_shorten(cell) for cell in row] for row in table.rows]
        )
        print_paragraph(console, table.note)


def _shorten(cell: Cell) -> Text:
    """A cell for a terminal; its interval is written with a dash."""
    return Text(cell.text.replace(" to ", "\N{EN DASH}"), style="dim" if cell.grey else "")
