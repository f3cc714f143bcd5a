"""Flag and output of ``hisparse plan`` for the time to move a prefix over a link."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from hisparse.cli.lists import names
from hisparse.cli.output import make_table, print_paragraph
from hisparse.plan.hardware import HOSTS
from hisparse.units import format_bytes, parse_rate

__all__ = ["add_flag", "describe_moves", "print_moves", "read_links"]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names links."""
    text = (
        "print the time to move K and V of a request over links, by their rate, such as 20GB/s, or "
        f"name: {', '.join(HOSTS)}"
    )
    parser.add_argument("--link", type=names, default=[], metavar="RATE[,RATE]", help=text)


def read_links(arguments: argparse.Namespace) -> dict[str, float]:
    """The links as they were named, each with its bytes a second.

    Raises:
        ConfigError: a link is neither a rate nor a name.
    """
    named = {name: host.copy_gb_s.value * 1e9 for name, host in HOSTS.items()}
    key = f"--link (a rate, or {', '.join(HOSTS)})"
    return {link: named.get(link) or parse_rate(key, link) for link in arguments.link}


def describe_moves(num_bytes: int, links: Mapping[str, float]) -> list[dict[str, Any]]:
    """The time of each link for ``num_bytes``, for JSON."""
    return [
        {"link": link, "bytes": num_bytes, "seconds": float(f"{num_bytes / rate:.4g}")}
        for link, rate in links.items()
    ]


def print_moves(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line for each link, context and size of a token; nothing without links."""
    figures = ("context", "a token", "K and V", "link", "seconds")
    table = make_table(*figures, right=figures, title="Time to move K and V of a request, computed")
    shown = {
        (row["context"], row["bytes_per_token"], move["link"]): move
        for row in rows
        for move in row["moves"]
    }
    if not shown:
        return
    for (context, token_bytes, link), move in shown.items():
        size = format_bytes(move["bytes"])
        cells = f"{context:,}", format_bytes(token_bytes), size, link, f"{move['seconds']:.3g}"
        table.add_row(*cells)
    console.print(table)
    print_paragraph(
        console,
        "Each GPU's part over a link of its own, at the whole rate, with nothing else on it.",
    )
    console.print()
