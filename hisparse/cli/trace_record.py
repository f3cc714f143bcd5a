"""``hisparse trace record``: selections of a model that reads a text, or prefixes of requests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.algorithms import build_algorithm
from hisparse.cli.terminal import names, number
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.options import parse_object, read_text
from hisparse.trace.prefix import convert_sglang, write_prefix


def add_parser(actions: Any) -> None:
    """Add the action to the parser of ``hisparse trace``."""
    text = (
        "record the selections of a model that reads a text; a server records with "
        '"trace": "FILE" in --hisparse-config'
    )
    parser = actions.add_parser("record", help=text, description=text)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the trace; with several "
        "algorithms their names are added")  # fmt: skip
    for name, text in (
        ("context", "tokens of the prompt"),
        ("steps", "decode steps"),
        ("budget", "tokens attended per step"),
    ):
        add(f"--{name}", type=number, metavar="N", help=f"{text} ({_DEFAULTS[name]})")
    model = parser.add_argument_group("of a model")
    add = model.add_argument
    add("--model", metavar="PATH|HUB_ID|NAME", help="the model (smollm2-135m)")
    text = "the text that it reads, prompt and steps (the built-in texts)"
    add("--text", type=Path, metavar="FILE", help=text)
    add("--algorithm", type=names, metavar="NAME[,NAME]", help="algorithms (sketch)")
    add("--config", metavar="JSON", help="further settings, as in --hisparse-config")
    add = parser.add_argument_group("of prefixes").add_argument
    text = "what SGLang wrote with --export-metrics-to-file; texts need --model; none is kept"
    add("--exported", type=Path, nargs="+", metavar="FILE", help=text)
    add("--block-size", type=number, metavar="N", help=f"tokens ({_BLOCK})")
    parser.set_defaults(run=_run)


#: Tokens of a block of recorded prefixes.
_BLOCK = 64
_DEFAULTS = {"context": 4096, "steps": 256, "budget": 512}
#: Flags of a model's selections alone.
_SELECTIONS = (*_DEFAULTS, "text", "algorithm", "config")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.exported is not None:
        for name in _SELECTIONS:
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"--{name}: got it with --exported, which does not use it; leave one out"
                )
        return _convert(arguments)
    if arguments.block_size is not None:
        raise ConfigError("--block-size: expected --exported with it; add that, or leave it out")
    budget = arguments.budget
    for name, value in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return _record(arguments, budget)


def _convert(arguments: argparse.Namespace) -> int:
    tokenize = None
    if arguments.model is not None:
        from transformers import AutoTokenizer

        from hisparse.eval.models import load, resolve

        tokenizer = load(AutoTokenizer, resolve(arguments.model))

        def tokenize(text: str) -> list[int]:
            ids: list[int] = tokenizer(text)["input_ids"]
            return ids

    size = arguments.block_size or _BLOCK
    write_prefix(arguments.out, convert_sglang(arguments.exported, size, tokenize))
    print(arguments.out)
    return 0


def _record(arguments: argparse.Namespace, budget: int | None) -> int:
    """Record a model; flags that were given, such as ``budget``, win over ``--config``."""
    settings = parse_object(arguments.config or "{}", "--config", '{"page_size": 32}')
    if budget is not None:
        settings["budget"] = budget
    elif "top_k" not in settings:  # The other name of budget.
        settings.setdefault("budget", _DEFAULTS["budget"])
    algorithms = arguments.algorithm or [settings.get("algorithm", HiSparseConfig.algorithm)]
    each = [settings | {"algorithm": x} for x in algorithms]
    for chosen in each:
        if "trace" in chosen:
            raise ConfigError('--config: got "trace", expected --out to name the file')
        build_algorithm(HiSparseConfig.from_dict(chosen))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hisparse.eval.models import load, resolve
    from hisparse.eval.record_trace import record_model
    from hisparse.eval.texts import TEXTS
    from hisparse.eval.texts import read_text as built_in

    name = arguments.model or "smollm2-135m"
    console = Console(stderr=True)
    folder = resolve(name, progress=lambda line: console.print(line, highlight=False))
    words = (
        "\n\n".join(map(built_in, TEXTS))
        if arguments.text is None
        else read_text(arguments.text, "--text")
    )
    ids: list[int] = load(AutoTokenizer, folder)(words)["input_ids"]
    needed = arguments.context + arguments.steps
    if len(ids) < needed:
        raise ConfigError(
            f"--context: got {arguments.context} and {arguments.steps} --steps, the text has "
            f"{len(ids)} tokens; give a longer --text"
        )
    model = load(AutoModelForCausalLM, folder).eval()
    note = f"{name}, {arguments.text.name if arguments.text else 'built-in texts'}"
    for chosen in each:
        out, label = arguments.out, chosen["algorithm"]
        if len(each) > 1:
            out = out.with_name(f"{out.stem}-{label}{out.suffix}")

        def show(step: int, label: str = label) -> None:
            status.update(f"{label}: step {step + 1} of {arguments.steps}")

        with console.status(f"{label}: prompt of {arguments.context} tokens") as status:
            path = record_model(
                model,
                ids[:needed],
                context=arguments.context,
                settings=chosen,
                path=out,
                note=note,
                progress=show,
            )
        print(path, flush=True)
    return 0
