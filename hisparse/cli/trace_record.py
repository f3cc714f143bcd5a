"""``hisparse trace record``: of a model that reads a text, or made up."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.algorithms import build_algorithm
from hisparse.cli.terminal import names, number
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.options import parse_object, read_text
from hisparse.trace.prefix import convert_sglang, make_up_sessions, write_prefix
from hisparse.trace.synthetic import MadeUpTrace


def add_parser(actions: Any) -> None:
    """Add the action to the parser of ``hisparse trace``."""
    text = (
        "record the selections of a model that reads a text, or make some up; a server records "
        'with "trace": "FILE" in --hisparse-config'
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
    made_up = parser.add_argument_group("made up, by no model")
    add = made_up.add_argument
    add("--synthetic", action="store_true", help="make a trace up; the file says so")
    default = MadeUpTrace
    text = "share of a selection that the step before had too (0.85)"
    add("--overlap", type=float, metavar="F", help=text)
    text = f"exponent of the distribution of the other pages ({default.zipf:g})"
    add("--zipf", type=float, metavar="X", help=text)
    for name in ("requests", "layers", "heads"):
        text = f"{name} of the trace ({getattr(default, name)})"
        add(f"--{name}", type=number, metavar="N", help=text)
    add("--page-size", type=number, metavar="N", help=f"tokens ({default.page_size})")
    add("--seed", type=int, metavar="N", help=f"of the generator ({default.seed})")
    text = "make up prefixes, of conversations of N turns, in place of selections"
    add("--turns", type=number, metavar="N", help=text)
    add = parser.add_argument_group("of prefixes").add_argument
    text = "what SGLang wrote with --export-metrics-to-file; texts need --model; none is kept"
    add("--exported", type=Path, nargs="+", metavar="FILE", help=text)
    add("--block-size", type=number, metavar="N", help=f"tokens ({_BLOCK})")
    parser.set_defaults(run=_run)


#: Tokens of a block of recorded prefixes.
_BLOCK = 64
_DEFAULTS = {"context": 4096, "steps": 256, "budget": 512}
_SELECTIONS = tuple(_DEFAULTS)
#: Flags that each kind of trace uses, by the flag that asks for it; "" for a model's selections.
_KINDS = {
    "": (*_SELECTIONS, "model", "text", "algorithm", "config"),
    "--synthetic": (
        *(*_SELECTIONS, "synthetic", "overlap", "zipf", "requests"),
        *("layers", "heads", "page_size", "seed"),
    ),
    "--turns": ("synthetic", "turns", "context", "requests", "zipf", "seed"),
    "--exported": ("exported", "block_size", "model"),
}


def _run(arguments: argparse.Namespace) -> int:
    kind = ""
    if arguments.exported is not None:
        kind = "--exported"
    elif arguments.synthetic:
        kind = "--synthetic" if arguments.turns is None else "--turns"
    _check_flags(arguments, kind)
    budget = arguments.budget
    for name, value in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if kind == "--exported":
        return _convert(arguments)
    return _make_up(arguments) if arguments.synthetic else _record(arguments, budget)


def _check_flags(arguments: argparse.Namespace, kind: str) -> None:
    """Refuse flags that this kind of trace does not use.

    Raises:
        ConfigError: one of them was given.
    """
    for needed, flags in _KINDS.items():
        for name in flags:
            value = getattr(arguments, name)
            if name in _KINDS[kind] or value is None or value is False:
                continue
            flag = f"--{name.replace('_', '-')}"
            if kind:
                raise ConfigError(
                    f"{flag}: got it with {kind}, which does not use it; leave out {flag} or {kind}"
                )
            needed = "--synthetic" if needed == "--turns" else needed
            raise ConfigError(f"{flag}: expected {needed} with it; add that, or leave out {flag}")


def _make_up(arguments: argparse.Namespace) -> int:
    if arguments.turns is not None:
        trace = make_up_sessions(
            requests=arguments.requests or 1000,
            turns=arguments.turns,
            zipf=MadeUpTrace.zipf if arguments.zipf is None else arguments.zipf,
            context=arguments.context,
            seed=arguments.seed or 0,
        )
        write_prefix(arguments.out, trace)
        print(arguments.out)
        return 0
    known = {f.name for f in fields(MadeUpTrace)}
    options = {n: x for n, x in vars(arguments).items() if n in known and x is not None}
    print(MadeUpTrace(**({"overlap": 0.85} | options)).write(arguments.out))
    return 0


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
