"""``hisparse kvcm replay``: which capacity the requests of a trace need."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli.terminal import (
    Values,
    add_command,
    add_flag,
    file,
    make_table,
    names,
    number,
    numbers,
    print_paragraph,
    print_result,
)
from hisparse.doctor import provenance
from hisparse.errors import ConfigError, quoted, unknown_name
from hisparse.kvcm.optimizer.policies import POLICIES
from hisparse.kvcm.optimizer.replay import Point, make_setup, read_setup, sweep
from hisparse.kvcm.optimizer.traces import Trace, read_trace

_SECONDS = Values(
    lambda text: None if text == "none" else float(text),
    "seconds such as 60,600 or none",
    "S",
    lambda x: x is None or 0 < x < 1e12,
)
_RATE = Values(
    float, "tokens a second, above 0", "TOKENS/S", lambda x: 0 < x < float("inf"), several=False
)


def add_parser(actions: Any) -> None:
    """Add the command to ``hisparse kvcm``."""
    text = "hits and time to first token with caches of several capacities, from traces of requests"
    parser = add_command(actions, "replay", text, _replay)
    text = "blocks of a cache (the whole trace, a half, a quarter, ...; with --config, its own)"
    add_flag(parser, "--capacity", numbers, text)
    text = f"{', '.join(POLICIES)} (lru,prefix_lru; with --config, its own)"
    add_flag(parser, "--policy", names, text)
    text = "seconds that an unused block stays in a prefix_lru, or none (none)"
    add_flag(parser, "--ttl", _SECONDS, text)
    text = "groups of instances, policies and eviction, as for Tair's optimizer_main; JSON"
    add_flag(parser, "--config", file, text)
    add_flag(parser, "--block-size", number, "tokens (as the trace says, else 16)")
    add_flag(parser, "--prefill-rate", _RATE, "prompt tokens that the model computes")
    add_flag(parser, "--load-rate", _RATE, "tokens that are loaded from the cache (at once)")
    text = "write INSTANCE_hit_rates.csv into this folder"
    add_flag(parser, "--out", file, text, metavar="FOLDER")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="traces")


def _replay(arguments: argparse.Namespace) -> int:
    for policy in arguments.policy or ():
        if policy not in POLICIES:
            raise ConfigError(f"--policy: {unknown_name('policy', policy, POLICIES)}")
    if arguments.out and len(arguments.files) > 1:
        got = len(arguments.files)
        raise ConfigError(f"--out: got {got} traces, expected one, whose instances name the files")
    if arguments.load_rate and not arguments.prefill_rate:
        raise ConfigError("--load-rate: got it alone, expected --prefill-rate too")
    found = [_replay_file(arguments, path) for path in arguments.files]
    result = {"command": "kvcm replay", **provenance.origin(), "traces": found}
    print_result(arguments, result, lambda console: _print(console, found))
    return 0


def _replay_file(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    trace = read_trace(path)
    setup = make_setup(trace) if arguments.config is None else read_setup(arguments.config)
    known = {x["instance_id"] for group in setup.groups for x in group["instances"]}
    for name in trace.instances.keys() - known:
        number = trace.instances[name]
        count = sum(event.instance == number for event in trace.events)
        trace.skipped[f"events of instance {quoted(name)}, which --config lacks"] = count
    if not known & trace.instances.keys():
        raise ConfigError(
            f"--config: got instances {quoted(sorted(known))}, expected one of the trace, "
            f"{quoted(sorted(trace.instances))}"
        )
    size = arguments.block_size or trace.block_size
    groups = sweep(
        trace,
        setup,
        _points(arguments, trace),
        size,
        prefill=arguments.prefill_rate,
        load=arguments.load_rate,
        out=arguments.out,
    )
    times = [event.time_us for event in trace.events]
    return {
        "file": str(path),
        "format": trace.format,
        "note": trace.note,
        "block_size": size,
        "reads": sum(event.asked is not None for event in trace.events),
        "blocks": trace.num_blocks,
        "seconds": (times[-1] - times[0]) / 1e6,
        "skipped": dict(trace.skipped),
        "found_by_server": trace.found_by_server,
        "groups": groups,
    }


def _points(arguments: argparse.Namespace, trace: Trace) -> list[Point]:
    policies: Sequence[str | None] = arguments.policy or ["lru", "prefix_lru"]
    capacities: Sequence[int | None] = [max(1, trace.num_blocks >> i) for i in range(6, -1, -1)]
    if arguments.config is not None:
        policies, capacities = arguments.policy or [None], [None]
    points = [
        Point(policy, capacity, ttl if policy == "prefix_lru" else None)
        for policy in policies
        for ttl in arguments.ttl or [None]
        for capacity in arguments.capacity or capacities
    ]
    return list(dict.fromkeys(points))


def _print(console: Console, found: Sequence[dict[str, Any]]) -> None:
    for about in found:
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        served = about["found_by_server"]
        text = (
            f"{about['format']}{': ' if about['note'] else ''}{about['note']}. "
            f"{about['reads']:,} reads in {about['seconds']:,.0f} s, {about['blocks']:,} different "
            f"blocks of {about['block_size']} tokens."
            + ("" if served is None else f" The server found {served:.1%} of the prompt tokens.")
            + "".join(f" Skipped: {n:,} {what}." for what, n in about["skipped"].items())
        )
        print_paragraph(console, text)
        for group in about["groups"]:
            _print_group(console, group)
    print_paragraph(
        console,
        "capacity, peak: blocks that the instances may hold, and held at most. hits: share of the "
        "blocks asked for that the cache held, from the first one on; internal: of those that the "
        "engine has itself. *: no smaller cache costs less.",
    )


def _print_group(console: Console, group: dict[str, Any]) -> None:
    figures = ("capacity", "ttl s", "hits", "internal", "peak", group["unit"])
    table = make_table("policy", *figures, "", right=figures, title=f"group {group['group']}")
    for row in group["points"]:
        table.add_row(
            row["policy"],
            f"{row['capacity']:,}",
            "-" if row["ttl_s"] is None else f"{row['ttl_s']:g}",
            f"{row['hit_rate']:.1%}",
            f"{row['internal_hit_rate']:.1%}",
            f"{row['peak_blocks']:,}",
            f"{row['cost']:,.4g}",
            "*" if row["front"] else "",
        )
    console.print(table)
    print_paragraph(console, group["recommendation"])
