"""``hisparse top``: what a running server does, in a table that is drawn again and again."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hisparse.cli.output import make_table
from hisparse.cli.top_view import Reading, read, view
from hisparse.errors import ConfigError
from hisparse.units import format_bytes, parse_seconds

_MAX_INTERVAL_S = 3600.0


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "show requests, residency, hit ratio, bytes moved and latency of a running server"
    parser = commands.add_parser("top", help=text, description=text)
    add = parser.add_argument
    add("url", metavar="URL", help="the server, such as http://127.0.0.1:30000")
    text = "time between two readings, which rates and latency are taken over (2s)"
    add("--interval", default="2s", metavar="TIME", help=text)
    add("--once", action="store_true", help="print one table and end")
    add("--json", action="store_true", help="print one JSON object and end")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    interval_s = parse_seconds("--interval", arguments.interval)
    if interval_s > _MAX_INTERVAL_S:
        raise ConfigError(f"--interval: got {arguments.interval}, expected at most 3600s")
    url = arguments.url.rstrip("/")
    console = Console(highlight=False)
    before = read(url)

    def step(before: Reading) -> tuple[dict[str, Any], Reading]:
        time.sleep(interval_s)
        now = read(url)
        return view(url, now, before), now

    found, before = step(before)
    if arguments.json:
        print(json.dumps(found, indent=2))
    elif arguments.once or not console.is_terminal:
        console.print(_table(found))
    else:
        try:
            with Live(_table(found), console=console, auto_refresh=False) as live:
                while True:
                    found, before = step(before)
                    live.update(_table(found), refresh=True)
        except KeyboardInterrupt:
            # This is how a live view ends.
            return 0
    return 0


def _table(found: dict[str, Any]) -> Table:
    """One line for each thing to look at."""
    ranks = f", {found['ranks']} ranks" if found["ranks"] > 1 else ""
    title = f"{', '.join(found['models'])} at {found['url']}{ranks}, last {found['seconds']:g} s"
    table = make_table("what", "now", right=("now",), title=title)
    requests, tokens, hits = found["requests"], found["tokens"], found["hit_ratio"]
    table.add_row("requests running", _number(requests["running"]))
    table.add_row("requests queued", _number(requests["queued"]))
    table.add_row("requests retracted since the start", _number(requests["retracted"]))
    for place, name in (("host", "tokens in the host pool"), ("device", "tokens of device pages")):
        used, total = tokens[place]["used"], tokens[place]["total"]
        share = f" ({used / total:.0%})" if total and used is not None else ""
        table.add_row(name, f"{_number(used)} of {_number(total)}{share}")
    table.add_row("hit ratio", _share(hits["recent"]))
    table.add_row("hit ratio since the start", _share(hits["since_start"]))
    for layer, ratio in found["hit_ratio_by_layer"].items():
        table.add_row(f"hit ratio of layer {layer} since the start", _share(ratio))
    rates = found["per_second"]
    for name in ("prompt_tokens", "output_tokens"):
        table.add_row(f"{name.replace('_', ' ')} a second", _number(rates[name]))
    for name, text in (
        ("decode_read_bytes", "read from host memory by decoding, a second"),
        ("prefill_read_bytes", "read from host memory by prefill, a second"),
        ("written_bytes", "written to host memory, a second"),
    ):
        table.add_row(text, _bytes(rates[name]))
    for name, text in (
        ("time_to_first_token", "time to first token, mean"),
        ("request_time_per_output_token", "time per output token, mean"),
        ("e2e_request_latency", "time of a request, mean"),
    ):
        seconds = found["latency_s"][name]
        table.add_row(text, "-" if seconds is None else f"{1000 * seconds:,.1f} ms")
    sizes = found["bytes"]
    for place in ("host", "device"):
        parts = [size for name, size in sizes.items() if name.startswith(place) and size]
        table.add_row(f"{place} memory", _bytes(sum(parts)))
    for name, count in found["faults"].items():
        if count:
            table.add_row(f"{name.replace('_', ' ')} since the start", _number(count))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(int(value))
