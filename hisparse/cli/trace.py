"""``hisparse trace``: record what a model selects, and replay it through other buffers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli import trace_record
from hisparse.cli.terminal import make_table, names, numbers, print_paragraph
from hisparse.doctor import provenance
from hisparse.errors import ConfigError, unknown_name
from hisparse.eval.report import check_matplotlib
from hisparse.trace import SelectionTrace
from hisparse.trace.prefix import (
    PrefixPoint,
    are_prefixes,
    describe_prefix,
    read_prefix,
    replay_all,
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

_HIT_RATIO = 0.8


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "record which pages a model selects; replay them through other buffers"
    parser = commands.add_parser("trace", help=text, description=text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    trace_record.add_parser(actions)
    _add_replay(actions)
    _add_recommend(actions)
    text = "what a trace holds"
    show = actions.add_parser("show", help=text, description=text)
    _add_files(show)
    show.set_defaults(run=_show)


def _add_replay(actions: Any) -> None:
    text = "hits and bytes that buffers of other sizes would have had"
    replay = actions.add_parser("replay", help=text, description=text)
    _add_files(replay)
    add = replay.add_argument
    shown = ",".join(map(str, USUAL_BUFFERS))
    text = f"tokens of a row's buffer ({shown}, but those that a selection does not fit)"
    add("--device-buffer-size", type=numbers, metavar="N[,N]", help=text)
    text = f"{', '.join(POLICIES)}, which knows the future and hits most often (lru)"
    add("--policy", type=names, metavar="NAME[,NAME]", help=text)
    text = "tokens of a prefix cache (the whole trace, a half, a quarter, ...)"
    add("--capacity", type=numbers, metavar="N[,N]", help=text)
    text = "seconds that an unused block stays in a prefix cache, or none (none)"
    add("--ttl", type=_seconds, metavar="S[,S]", help=text)
    text = "draw hit ratio and bytes against the size of the buffer"
    add("--plot", type=Path, metavar="FILE.svg", help=text)
    replay.set_defaults(run=_replay)


def _add_recommend(actions: Any) -> None:
    text = "the smallest device_buffer_size for a hit ratio"
    recommend = actions.add_parser("recommend", help=text, description=text)
    _add_files(recommend)
    recommend.add_argument(
        "--hit-ratio",
        type=_ratio,
        default=_HIT_RATIO,
        metavar="F",
        help=f"share of the selected pages that must be on the device ({_HIT_RATIO})",
    )
    recommend.set_defaults(run=_recommend)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="traces")
    add("--json", action="store_true", help="print one JSON object instead")


def _seconds(text: str) -> list[float | None]:
    """``"60,600,none"`` -> ``[60.0, 600.0, None]``.

    Raises:
        ArgumentTypeError: a value is neither a number above 0 nor "none".
    """
    try:
        found = [None if word == "none" else float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(x is None or 0 < x < 1e12 for x in found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds such as 60,600 or none")
    return found


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a fraction from 0 to 1")
    return value


def _origin(action: str) -> dict[str, Any]:
    return {
        "command": f"trace {action}",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
    }


def _show(arguments: argparse.Namespace) -> int:
    found = []
    if are_prefixes(arguments.files):
        found = [describe_prefix(x, read_prefix(x)) for x in arguments.files]
        return _print_prefixes("show", arguments, found)
    for file in arguments.files:
        with SelectionTrace(file) as trace:
            found.append(describe(file, trace) | overlaps(trace))
    if arguments.json:
        print(json.dumps(_origin("show") | {"traces": found}, indent=2))
        return 0
    console = Console(highlight=False)
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
    return 0


def _refuse(arguments: argparse.Namespace, flags: tuple[str, ...], kind: str) -> None:
    """Refuse flags that traces of this kind do not use.

    Raises:
        ConfigError: one of them was given.
    """
    for flag in flags:
        if getattr(arguments, flag[2:].replace("-", "_")) is not None:
            raise ConfigError(f"{flag}: got it with {kind}, which do not use it; leave it out")


def _replay(arguments: argparse.Namespace) -> int:
    if are_prefixes(arguments.files):
        _refuse(arguments, ("--device-buffer-size", "--policy", "--plot"), "prefix traces")
        ttls = arguments.ttl or [None]
        found = [replay_all(x, arguments.capacity, ttls) for x in arguments.files]
        return _print_prefixes("replay", arguments, found)
    _refuse(arguments, ("--capacity", "--ttl"), "traces of selections")
    policies = list(dict.fromkeys(arguments.policy or ["lru"]))
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"--policy: {unknown_name('policy', policy, POLICIES)}")
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise ConfigError(f"--plot: got {str(arguments.plot)!r}, expected a file.svg")
    if arguments.plot is not None:
        check_matplotlib("--plot")
    found = [replay_trace(x, policies, arguments.device_buffer_size) for x in arguments.files]
    if arguments.plot is not None:
        from hisparse.eval.plots import to_svg, trace_figure

        arguments.plot.write_text(to_svg(trace_figure(found)), encoding="utf-8")
    if arguments.json:
        print(json.dumps(_origin("replay") | {"traces": found}, indent=2))
    else:
        _print_replay(found)
    return 0


def _print_replay(found: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    for about in found:
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        if about["note"]:
            print_paragraph(console, about["note"])
        figures = ("buffer", "hits", "read a step")
        table = make_table("policy", *figures, right=figures)
        for policy, result in about["policies"].items():
            for tokens, ratio, read in zip(
                about["buffers"], result["hit_ratio"], result["bytes_per_step"], strict=True
            ):
                table.add_row(policy, f"{tokens:,}", f"{ratio:.1%}", format_bytes(round(read)))
        console.print(table)
    print_paragraph(
        console,
        "buffer: tokens of each row in each layer. hits: share of the selected pages that were in "
        "it. read a step: bytes from host memory for each decode step of a request.",
    )


def _recommend(arguments: argparse.Namespace) -> int:
    found = [recommend(file, arguments.hit_ratio) for file in arguments.files]
    if arguments.json:
        print(json.dumps(_origin("recommend") | {"traces": found}, indent=2))
        return 0
    console = Console(highlight=False)
    for about in found:
        print_paragraph(
            console,
            f'"device_buffer_size": {about["device_buffer_size"]} gives {about["hit_ratio"]:.1%} '
            f"hits and reads {format_bytes(round(about['bytes_per_step']))} for each decode step "
            f"of a request ({about['file']}).",
        )
    return 0


def _print_prefixes(
    action: str,
    arguments: argparse.Namespace,
    found: list[dict[str, Any]],
) -> int:
    if arguments.json:
        print(json.dumps(_origin(action) | {"traces": found}, indent=2))
    else:
        _print_prefix(found)
    return 0


def _print_prefix(found: Sequence[dict[str, Any]]) -> None:
    """What each trace holds and, if it was replayed, its caches."""
    console = Console(highlight=False)
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
        if "points" in about:
            figures = ("capacity", "ttl s", "hits", "peak")
            table = make_table(*figures, "front", right=figures)
            for point in about["points"]:
                own = PrefixPoint(**{k: v for k, v in point.items() if k != "pareto"})
                table.add_row(
                    f"{own.capacity:,}",
                    "-" if own.ttl_s is None else f"{own.ttl_s:g}",
                    f"{own.hit_ratio:.1%}",
                    f"{own.peak_tokens:,}",
                    "*" if point["pareto"] else "",
                )
            console.print(table)
    if "points" in found[0]:
        print_paragraph(
            console,
            "capacity, peak: tokens that the cache may hold, and held at most. hits: prompt tokens "
            "that it held. *: no other cache holds at most as much and hits at least as often.",
        )
