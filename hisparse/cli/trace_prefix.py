"""The part of ``hisparse trace`` that shows and replays prefix traces."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli.output import make_table, print_paragraph
from hisparse.errors import ConfigError
from hisparse.trace.cache_events import read_events, summarize
from hisparse.trace.prefix import PrefixTrace, is_prefix_trace, read_prefix
from hisparse.trace.prefix_replay import PrefixPoint, on_front, replay_prefix


def seconds(text: str) -> list[float | None]:
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


def are_prefixes(files: Sequence[Path]) -> bool:
    """Whether files are prefix traces.

    Raises:
        ConfigError: some are, and others are not.
    """
    kinds = [is_prefix_trace(file) for file in files]
    if any(kinds) and not all(kinds):
        raise ConfigError("got prefix traces and traces of selections, expected one of the two")
    return any(kinds)


def describe_prefix(file: Path, trace: PrefixTrace) -> dict[str, Any]:
    """What a prefix trace holds."""
    requests = trace.requests
    inputs = sum(x.input_length for x in requests)
    known = [(x.cached_length, x.input_length) for x in requests if x.cached_length is not None]
    cached, asked = (sum(column) for column in zip(*known, strict=True)) if known else (0, 0)
    return {
        "file": str(file),
        "source": trace.source,
        "note": trace.note,
        "block_size": trace.block_size,
        "requests": len(requests),
        "seconds": (requests[-1].timestamp - requests[0].timestamp) / 1000,
        "input_tokens": inputs,
        "output_tokens": sum(x.output_length for x in requests),
        "blocks": len({b for x in requests for b in x.hash_ids}),
        "unique_tokens": _count_unique(trace),
        "found_by_server": cached / max(1, asked) if known else None,
        "unlimited_hit_ratio": replay_prefix(trace, None, None).hit_ratio,
    }


def _count_unique(trace: PrefixTrace) -> int:
    """Tokens of the different blocks; the last block of a prompt may be partly filled."""
    tokens: dict[int, int] = {}
    for request in trace.requests:
        left = request.input_length
        for block in request.hash_ids:
            filled = min(left, trace.block_size)
            tokens[block] = max(tokens.get(block, 0), filled)
            left -= filled
    return sum(tokens.values())


def replay_all(
    file: Path, capacities: Sequence[int] | None, ttls: Sequence[float | None]
) -> dict[str, Any]:
    """Replay a prefix trace through each capacity and lifetime.

    Raises:
        ConfigError: the file is damaged.
    """
    trace = read_prefix(file)
    about = describe_prefix(file, trace)
    if capacities is None:
        whole = max(1, about["blocks"])
        capacities = [max(1, whole >> i) * trace.block_size for i in range(6, -1, -1)]
    points = [
        replay_prefix(trace, capacity, ttl)
        for ttl in ttls
        for capacity in dict.fromkeys(capacities)
    ]
    front = on_front(points)
    return about | {
        "points": [asdict(x) | {"pareto": best} for x, best in zip(points, front, strict=True)]
    }


def print_prefix(found: Sequence[dict[str, Any]]) -> None:
    """What each trace holds and, if it was replayed, its caches."""
    console = Console(highlight=False)
    for about in found:
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        made_up = about["source"] == "made up"
        source = "made up, from no server" if made_up else about["source"]
        served = about["found_by_server"]
        text = (
            f"{source}{': ' if about['note'] else ''}{about['note']}. {about['requests']:,} "
            f"requests in {about['seconds']:,.0f} s, {about['input_tokens']:,} prompt tokens, "
            f"{about['unique_tokens']:,} of them different, in blocks of {about['block_size']}. "
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


def describe_events(file: Path) -> dict[str, Any]:
    """What a file of cache events holds."""
    note, events = read_events(file)
    return {"file": str(file), "source": "recorded", "note": note} | summarize(events)


def print_events(found: Sequence[dict[str, Any]]) -> None:
    """What each file of cache events holds."""
    console = Console(highlight=False)
    for about in found:
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        age, lost = about["median_age_s"], about["lost_messages"]
        text = (
            f"recorded: {about['note']}. In {about['seconds']:,.0f} s the cache inserted "
            f"{about['inserted']:,} blocks, {about['inserted_again']:,} of them after it had "
            f"evicted them, evicted {about['evicted']:,} and cleared {about['cleared']:,}. It held "
            f"at most {about['most_tokens']:,} tokens"
            + ("." if age is None else f", an evicted block for {age:,.1f} s (median).")
            + (f" Messages are missing in {lost:,} places." if lost else "")
        )
        print_paragraph(console, text)
