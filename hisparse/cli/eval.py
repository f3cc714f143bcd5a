"""``hisparse eval``: measure what sparse attention costs in quality on a real model."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hisparse.cli.terminal import (
    add_command,
    add_flag,
    file,
    make_table,
    model,
    names,
    number,
    numbers,
    print_paragraph,
    print_result,
    progress_bar,
    require,
    string,
)
from hisparse.config import HiSparseConfig
from hisparse.doctor import provenance
from hisparse.errors import ConfigError, unknown_name
from hisparse.eval import TASKS, Evaluation, Method, make_cells, make_summary, parse_methods
from hisparse.eval.evaluation import Progress, bytes_per_token, check_context
from hisparse.eval.models import MODELS, default_cache, load, resolve
from hisparse.eval.results import make_ruler_cells
from hisparse.eval.ruler import TASKS as RULER_TASKS
from hisparse.eval.ruler import RulerEvaluation, make_prompts
from hisparse.eval.tables import Table, make_ruler_tables, make_tables
from hisparse.model_config import AS_LATENTS, text_config
from hisparse.options import read_text

#: The ceiling, the default and the floor.
_ALGORITHMS = ["oracle", HiSparseConfig.algorithm, "streaming"]
#: What ``make ruler`` installs, and documents of each of RULER's tasks.
_RULER = Path(sys.prefix) / "ruler"
_RULER_DOCUMENTS = 50
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "measure what sparse attention costs in quality on a real model"
    parser = add_command(commands, "eval", text, _run)
    add = functools.partial(add_flag, parser)
    repeated: dict[str, Any] = {"action": "append", "default": []}
    add("--model", model, "the model", "smollm2-135m")
    add("--algorithm", names, "algorithms", _ALGORITHMS)
    add("--budget", numbers, "tokens attended per step", [256])
    text = "a whole --hisparse-config, as JSON or @FILE; may be given more than once"
    add("--config", string, text, metavar="JSON", **repeated)
    add("--dtype", string, "dtype of the model; auto is its own", "auto", choices=_DTYPES)
    add("--context", numbers, "tokens of a document", [4096])
    add("--seeds", number, "documents of each text and length", 1)
    text = "read documents from this file instead of the built-in texts; may be repeated"
    add("--text", file, text, **repeated)
    add("--tasks", names, "only these of the built-in or of RULER's tasks")
    text = "let its grouped-query attention be latent attention (MLA), which is exact: judges MLA"
    parser.add_argument("--mla", action="store_true", help=text)
    text = "run RULER's 13 tasks instead of the built-in ones"
    parser.add_argument("--ruler", action="store_true", help=text)
    add("--limit", number, f"documents of each task of RULER ({_RULER_DOCUMENTS})")
    text = "where records are kept; an interrupted run continues from them"
    add("--out", file, text, Path("hisparse-eval"), metavar="FOLDER")


def _run(arguments: argparse.Namespace) -> int:
    methods = parse_methods(arguments.algorithm, arguments.budget, arguments.config)
    _check_different("--context", arguments.context)
    if arguments.ruler:
        return _run_ruler(arguments, methods)
    tasks = _read_tasks(arguments, "task", TASKS) or Evaluation.tasks
    if arguments.limit is not None:
        raise ConfigError(f"--limit: got {arguments.limit} with built-in tasks, expected --ruler")
    _check_different("--text", [file.stem for file in arguments.text])
    given = {file.stem: read_text(file, "--text") for file in arguments.text}
    texts = {"texts": given} if given else {}
    net, tokenizer, folder = _load(arguments)
    with _progress() as progress:
        records = Evaluation(
            model=net,
            tokenizer=tokenizer,
            methods=methods,
            contexts=arguments.context,
            seeds=arguments.seeds,
            folder=folder,
            tasks=tasks,
            progress=progress,
            **texts,
        ).run()
    result = _origin(arguments) | {
        "dtype": str(net.dtype).removeprefix("torch."),
        "cells": make_cells(records),
        "summary": make_summary(records),
    }
    print_result(arguments, result, lambda console: _print_tables(console, make_tables(result)))
    return 0


def _run_ruler(arguments: argparse.Namespace, methods: Sequence[Method]) -> int:
    """Run RULER's tasks."""
    tasks = _read_tasks(arguments, "RULER task", RULER_TASKS) or list(RULER_TASKS)
    if arguments.text or arguments.seeds > 1:
        flag = "--text" if arguments.text else "--seeds"
        raise ConfigError(f"{flag}: got it with --ruler, expected one of them: RULER has its own")
    net, tokenizer, folder = _load(arguments)
    for length in arguments.context:
        check_context(net, length)
    with _progress() as progress:
        prompts = make_prompts(
            tokenizer,
            tasks=tasks,
            contexts=arguments.context,
            count=arguments.limit or _RULER_DOCUMENTS,
            package=_RULER,
            cache=default_cache() / "ruler",
            progress=progress,
        )
        records = RulerEvaluation(
            model=net,
            tokenizer=tokenizer,
            methods=methods,
            prompts=prompts,
            folder=folder,
            progress=progress,
        ).run()
    result = _origin(arguments) | {
        "dtype": str(net.dtype).removeprefix("torch."),
        "cells": make_ruler_cells(records),
    }
    sizes = {(m.name, m.config.budget): bytes_per_token(net, m.config) for m in methods}
    for cell in result["cells"]:
        cell["bytes_per_token"] = sizes.get((cell["method"], cell["budget"]), 0)
    tables = make_ruler_tables(result["cells"])
    print_result(arguments, result, lambda console: _print_tables(console, tables))
    return 0


def _read_tasks(arguments: argparse.Namespace, kind: str, known: Collection[str]) -> list[str]:
    """The tasks that were named."""
    tasks: list[str] = arguments.tasks or []
    _check_different("--tasks", tasks)
    for name in tasks:
        if name not in known:
            raise ConfigError(f"--tasks: {unknown_name(kind, name, known)}")
    return tasks


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, lines elsewhere, of what is done and how long the rest will take."""
    began = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("")

        def report(what: str, done: int, total: int) -> None:
            nonlocal began
            began = began if done else time.monotonic()
            bar.update(task, description=what, completed=done, total=total)
            if bar.disable:
                passed = time.monotonic() - began
                left = f", {passed / done * (total - done) / 60:.0f} min left" if done else ""
                print(f"hisparse: {done} of {total}{left}: {what}", file=sys.stderr, flush=True)

        yield report


def _origin(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command line, machine, versions and model of a result."""
    return {
        "command": "eval",
        "line": shlex.join(["hisparse", *sys.argv[1:]]),
        **provenance.origin(),
        "model": arguments.model,
        "model_source": MODELS[arguments.model].source if arguments.model in MODELS else None,
        "mla": arguments.mla,
        "context": arguments.context,
    }


def _check_different(flag: str, names: Sequence[object]) -> None:
    """Refuse a value that is given twice: the same documents would count twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag}: got {name} more than once, expected it once")


def _load(arguments: argparse.Namespace) -> tuple[Any, Any, Path]:
    """The model, its tokenizer, and where the records of its attention are kept."""
    import torch

    require("transformers", "hisparse eval", "'hisparse[eval]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve(arguments.model)
    net = load(AutoModelForCausalLM, folder, dtype=arguments.dtype).eval()
    setattr(text_config(net), AS_LATENTS, arguments.mla)
    if torch.cuda.is_available():
        net = net.cuda()
    records = arguments.out / f"{Path(folder).name}{'-mla' if arguments.mla else ''}"
    return net, load(AutoTokenizer, folder), records


def _print_tables(console: Console, tables: Sequence[Table]) -> None:
    for title, note, heads, rows in tables:
        table = make_table(*heads, right=heads[1:], title=title)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        print_paragraph(console, note)
        console.print()
