"""``hisparse trace``: record what a model selects, and replay it through other buffers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli.terminal import (
    Values,
    add_command,
    add_flag,
    make_table,
    model,
    names,
    number,
    numbers,
    print_paragraph,
    print_result,
    ratio,
)
from hisparse.doctor import provenance
from hisparse.errors import ConfigError, unknown_name
from hisparse.eval.record_trace import DEFAULTS, record_text, tokenizer_of
from hisparse.options import parse_object
from hisparse.trace import SelectionTrace
from hisparse.trace.prefix import (
    are_prefixes,
    convert_sglang,
    describe_prefix,
    read_prefix,
    replay_all,
    write_prefix,
)
from hisparse.trace.replay import (
    POLICIES,
    USUAL_BUFFERS,
    describe,
    overlaps,
    recommend,
    replay_trace,
)
from hisparse.units import format_bytes

#: Tokens of a block of recorded prefixes.
_BLOCK = 64
_SECONDS = Values(
    lambda text: None if text == "none" else float(text),
    "seconds such as 60,600 or none",
    "S",
    lambda x: x is None or 0 < x < 1e12,
)


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "record which pages a model selects; replay them through other buffers"
    parser = add_command(commands, "trace", text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_record(actions)
    text = "hits and bytes that buffers of other sizes would have had"
    replay = add_command(actions, "replay", text, _replay)
    shown = ",".join(map(str, USUAL_BUFFERS))
    text = f"tokens of a row's buffer ({shown}, but those that a selection does not fit)"
    add_flag(replay, "--device-buffer-size", numbers, text)
    text = f"{', '.join(POLICIES)}, which knows the future and hits most often (lru)"
    add_flag(replay, "--policy", names, text)
    text = "tokens of a prefix cache (the whole trace, a half, a quarter, ...)"
    add_flag(replay, "--capacity", numbers, text)
    text = "seconds that an unused block stays in a prefix cache, or none (none)"
    add_flag(replay, "--ttl", _SECONDS, text)
    text = "the smallest device_buffer_size for a hit ratio"
    smallest = add_command(actions, "recommend", text, _recommend)
    text = "share of the selected pages that must be on the device"
    add_flag(smallest, "--hit-ratio", ratio, text, 0.8)
    show = add_command(actions, "show", "what a trace holds", _show)
    for each in (replay, smallest, show):
        each.add_argument("files", nargs="+", type=Path, metavar="FILE", help="traces")


def _add_record(actions: Any) -> None:
    text = (
        "record the selections of a model that reads a text; a server records with "
        '"trace": "FILE" in --hisparse-config'
    )
    parser = add_command(actions, "record", text, _record, json=False)
    add_flag(parser, "--out", Path, "the trace", required=True)
    add_flag(parser, "--model", model, "the model (smollm2-135m)")
    # Without defaults: a flag that was given wins over --config, and is refused with --exported.
    group = parser.add_argument_group("of a model")
    add_flag(group, "--context", number, f"tokens of the prompt ({DEFAULTS['context']})")
    add_flag(group, "--steps", number, f"decode steps ({DEFAULTS['steps']})")
    add_flag(group, "--budget", number, "tokens attended per step")
    text = "the text that it reads, prompt and steps (the built-in texts)"
    add_flag(group, "--text", Path, text)
    add_flag(group, "--algorithm", str, "the algorithm")
    text = "further settings, as in --hisparse-config"
    add_flag(group, "--config", str, text, metavar="JSON")
    group = parser.add_argument_group("of prefixes")
    text = "what SGLang wrote with --export-metrics-to-file; texts need --model; none is kept"
    add_flag(group, "--exported", Path, text, nargs="+")
    add_flag(group, "--block-size", number, f"tokens ({_BLOCK})")


def _record(arguments: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    settings = {name: given[name] for name in ("algorithm", "budget") if name in given}
    sizes = {name: given.get(name, default) for name, default in DEFAULTS.items()}
    if arguments.exported is not None:
        flags = (*DEFAULTS, "budget", "text", "algorithm", "config")
        _refuse(arguments, flags, "--exported, which does")
        tokenize = None if arguments.model is None else tokenizer_of(arguments.model)
        size = arguments.block_size or _BLOCK
        write_prefix(arguments.out, convert_sglang(arguments.exported, size, tokenize))
        print(arguments.out)
        return 0
    if arguments.block_size is not None:
        raise ConfigError(
            f"--block-size: got {arguments.block_size} without --exported, expected both or none"
        )
    with Console(stderr=True).status("reading the model") as status:
        path = record_text(
            arguments.model or "smollm2-135m",
            arguments.out,
            settings=parse_object(arguments.config or "{}", "--config", '{"page_size": 32}')
            | settings,
            text=arguments.text,
            progress=status.update,
            **sizes,
        )
    print(path)
    return 0


def _result(action: str, traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"command": f"trace {action}", **provenance.origin(), "traces": traces}


def _show(arguments: argparse.Namespace) -> int:
    if are_prefixes(arguments.files):
        found = [describe_prefix(x, read_prefix(x)) for x in arguments.files]
        shown = _print_prefixes
    else:
        found, shown = [], _print_selections
        for file in arguments.files:
            with SelectionTrace(file) as trace:
                found.append(describe(file, trace) | overlaps(trace))
    result = _result("show", found)
    print_result(arguments, result, lambda console: shown(console, found))
    return 0


def _print_selections(console: Console, found: Sequence[dict[str, Any]]) -> None:
    for about in found:
        low, high = about["context"]
        lines = {
            **({"note": about["note"]} if about["note"] else {}),
            "selected by": f"{about['algorithm']}, per {about['scope']}, pages of "
            f"{about['page_size']} tokens, {about['layers']} layers of {about['heads']} rows",
            "steps": f"{about['request_steps']:,}, one for each request in each decode step, of "
            f"{about['requests']:,} requests; contexts of {low:,} to {high:,} tokens",
            "pages": f"{about['selected_pages']:,} selected, {about['bytes_per_page']:.2f} bytes "
            f"each ({format_bytes(about['bytes'])})",
            "overlap": "no two steps in a row"
            if about["adjacent_overlap"] is None
            else f"{about['adjacent_overlap']:.1%} of a selection was in that of the step before",
            "ended": about["ended"]
            + (f", {about['dropped_steps']:,} steps dropped" if about["dropped_steps"] else ""),
        }
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        for name, text in lines.items():
            print_paragraph(console, f"{name:12}{text}", hanging=12)


def _refuse(arguments: argparse.Namespace, flags: Sequence[str], kind: str) -> None:
    """Refuse flags that traces of this kind do not use.

    Raises:
        ConfigError: one of them was given.
    """
    for flag in flags:
        if getattr(arguments, flag) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')}: got it with {kind} not use it, expected it left out"
            )


def _replay(arguments: argparse.Namespace) -> int:
    if are_prefixes(arguments.files):
        _refuse(arguments, ("device_buffer_size", "policy"), "prefix traces, which do")
        ttls = arguments.ttl or [None]
        found = [replay_all(x, arguments.capacity, ttls) for x in arguments.files]
        result = _result("replay", found)
        print_result(arguments, result, lambda console: _print_prefixes(console, found))
        return 0
    _refuse(arguments, ("capacity", "ttl"), "traces of selections, which do")
    policies = list(dict.fromkeys(arguments.policy or ["lru"]))
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"--policy: {unknown_name('policy', policy, POLICIES)}")
    found = [replay_trace(x, policies, arguments.device_buffer_size) for x in arguments.files]
    result = _result("replay", found)
    print_result(arguments, result, lambda console: _print_replay(console, found))
    return 0


def _print_replay(console: Console, found: Sequence[dict[str, Any]]) -> None:
    for about in found:
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        if about["note"]:
            print_paragraph(console, about["note"])
        figures = ("buffer", "hits", "read a step")
        table = make_table("policy", *figures, right=figures)
        for policy, result in about["policies"].items():
            columns = (about["buffers"], result["hit_ratio"], result["bytes_per_step"])
            for tokens, hits, read in zip(*columns, strict=True):
                table.add_row(policy, f"{tokens:,}", f"{hits:.1%}", format_bytes(round(read)))
        console.print(table)
    print_paragraph(
        console,
        "buffer: tokens of each row in each layer. hits: share of the selected pages that were in "
        "it. read a step: bytes from host memory for each decode step of a request.",
    )


def _recommend(arguments: argparse.Namespace) -> int:
    found = [recommend(file, arguments.hit_ratio) for file in arguments.files]

    def show(console: Console) -> None:
        for about in found:
            print_paragraph(
                console,
                f'"device_buffer_size": {about["device_buffer_size"]} gives '
                f"{about['hit_ratio']:.1%} hits and reads "
                f"{format_bytes(round(about['bytes_per_step']))} for each decode step of a request "
                f"({about['file']}).",
            )

    print_result(arguments, _result("recommend", found), show)
    return 0


def _print_prefixes(console: Console, found: Sequence[dict[str, Any]]) -> None:
    """What each trace holds and, if it was replayed, its caches."""
    for about in found:
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        served = about["found_by_server"]
        source = ": ".join(filter(None, (about["source"], about["note"])))
        text = (
            f"{source}. {about['requests']:,} requests in {about['seconds']:,.0f} s, "
            f"{about['input_tokens']:,} prompt tokens in {about['blocks']:,} different blocks of "
            f"{about['block_size']}. "
            f"An unlimited cache holds {about['unlimited_hit_ratio']:.1%} of all prompt tokens"
            + ("." if served is None else f"; the server found {served:.1%} of those it reports.")
        )
        print_paragraph(console, text)
        if "points" not in about:
            continue
        figures = ("capacity", "ttl s", "hits", "peak")
        table = make_table(*figures, right=figures)
        for point in about["points"]:
            table.add_row(
                f"{point['capacity']:,}",
                "-" if point["ttl_s"] is None else f"{point['ttl_s']:g}",
                f"{point['hit_ratio']:.1%}",
                f"{point['peak_tokens']:,}",
            )
        console.print(table)
    if "points" in found[0]:
        print_paragraph(
            console,
            "capacity, peak: tokens that the cache may hold, and held at most. hits: prompt tokens "
            "that it held.",
        )
