"""``hisparse top``: a live table of what a running server does."""

import argparse
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hisparse.cli.terminal import add_command, add_flag, make_table, require, string
from hisparse.errors import ConfigError, one_line, quoted
from hisparse.units import format_bytes, parse_seconds

_MAX_INTERVAL_S = 3600.0
_TIMEOUT_S = 10.0
#: Far more than a server with many ranks and layers sends.
_MAX_BYTES = 64 * 2**20
#: Label of a replica, and labels of its ranks. SGLang omits those that a server does not need.
_REPLICA = "dp_rank"
_RANKS = (_REPLICA, "pp_rank", "tp_rank")
#: Counters whose rise in a second is shown, and histograms of SGLang, in seconds.
_RATES = {
    "prompt_tokens": "sglang:prompt_tokens_total",
    "output_tokens": "sglang:generation_tokens_total",
    "decode_read_bytes": "hisparse:decode_read_bytes_total",
    "prefill_read_bytes": "hisparse:prefill_read_bytes_total",
    "written_bytes": "hisparse:written_bytes_total",
}
_LATENCIES = ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
#: Memory of hisparse, in bytes.
_PARTS = tuple(f"host_{x}" for x in ("kv", "representation"))
_PARTS += tuple(f"device_{x}" for x in ("kv", "representation", "table"))
#: Fields of :func:`view` with a line for each of their values.
_GROUPS = ("requests", "hit_ratio", "per_second", "latency_s", "bytes", "faults")


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "show requests, residency, hit ratio, bytes moved and latency of a running server"
    parser = add_command(commands, "top", text, _run)
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:30000")
    text = "time between two readings, which rates and latency are taken over"
    add_flag(parser, "--interval", string, text, "2s", metavar="TIME")
    parser.add_argument("--once", action="store_true", help="print one table and end")


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
    """What :func:`view` found, a line for each value; those that are not known are left out."""
    ranks = f", {found['ranks']} ranks" if found["ranks"] > 1 else ""
    title = f"{', '.join(found['models'])} at {found['url']}{ranks}, last {found['seconds']:g} s"
    table = make_table("what", "now", right=("now",), title=title)
    for place, tokens in found["tokens"].items():
        if tokens["total"] and tokens["used"] is not None:
            share = tokens["used"] / tokens["total"]
            now = f"{tokens['used']:,.0f} of {tokens['total']:,.0f} ({share:.0%})"
            table.add_row(f"tokens {place}", now)
    for group in _GROUPS:
        for name, value in found[group].items():
            if value or (value == 0 and group != "faults"):
                label = f"{group.removesuffix('_s')} {name}".replace("_", " ")
                table.add_row(label, _format(group, name, value))
    return table


def _format(group: str, name: str, value: float) -> str:
    if group == "hit_ratio":
        return f"{value:.1%}"
    if group == "latency_s":
        return f"{1000 * value:,.1f} ms"
    if group == "bytes" or name.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:,.0f}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Samples of one moment.

    Attributes:
        time_s: seconds of a clock that never goes back.
        samples: name to a value for each set of labels.
    """

    time_s: float
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    def total(self, name: str) -> float | None:
        """The sum over all sets of labels; None: the server has no such metric."""
        values = [value for _, value in self.samples.get(name, ())]
        return sum(values) if values else None

    def largest(self, name: str) -> float | None:
        """The largest value of each replica, summed: its ranks count the same requests."""
        found: dict[str | None, float] = {}
        for labels, value in self.samples.get(name, ()):
            replica = labels.get(_REPLICA)
            found[replica] = max(found.get(replica, value), value)
        return sum(found.values()) if found else None

    def labels(self, name: str, *keys: str) -> set[tuple[str | None, ...]]:
        """All values of some labels."""
        found = self.samples.get(name, ())
        return {tuple(labels.get(key) for key in keys) for labels, _ in found}


def read(url: str) -> Reading:
    """Ask a server for its metrics.

    Args:
        url: of the server, such as ``http://127.0.0.1:30000``.

    Raises:
        ConfigError: there is no such server, or its metrics are not those of a server with
            hisparse.
    """
    require("prometheus_client", "hisparse top", "prometheus-client")
    from prometheus_client.parser import text_string_to_metric_families

    page, now = _fetch(f"{url}/metrics"), time.monotonic()
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError):
        # The parser raises these for a page that is not Prometheus text.
        raise ConfigError(
            f"{url}/metrics: got {quoted(page[:40])}, expected Prometheus metrics"
        ) from None
    if "hisparse:hit_pages_total" not in samples:
        raise ConfigError(
            f"{url}/metrics: got no metrics of hisparse, expected a server that was started with "
            "--attention-backend hisparse --enable-metrics"
        )
    return Reading(time_s=now, samples=samples)


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"got {quoted(url)}, expected a URL such as http://127.0.0.1:30000")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            page: bytes = reply.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        raise ConfigError(
            f"{url}: got HTTP {error.code}, expected an SGLang server that was started with "
            "--enable-metrics"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        found = one_line(reason if isinstance(reason, Exception) else error)
        raise ConfigError(f"{url}: got {found}, expected a running SGLang server") from None
    return page.decode(errors="replace")


def view(url: str, now: Reading, before: Reading) -> dict[str, Any]:
    """One JSON object: the state now, and what changed since an earlier reading.

    ``per_second``, ``latency_s`` and ``hit_ratio.recent`` are of the time between the readings. A
    value is None where there is nothing to divide by, or no such metric.
    """
    largest, total, seconds = now.largest, now.total, now.time_s - before.time_s

    def risen(name: str) -> float | None:
        """How far a counter rose; None: there is none, or the server started again meanwhile."""
        value, earlier = total(name), before.total(name) or 0.0
        return None if value is None or value < earlier else value - earlier

    pages = ("hisparse:hit_pages_total", "hisparse:miss_pages_total")
    return {
        "url": url,
        "models": sorted(str(name) for (name,) in now.labels(pages[0], "model_name") if name),
        "ranks": len(now.labels(pages[0], *_RANKS)),
        "seconds": round(seconds, 3),
        "requests": {
            "running": largest("sglang:num_running_reqs"),
            "queued": largest("sglang:num_queue_reqs"),
            "retracted": largest("sglang:num_retracted_requests_total"),
        },
        "tokens": {
            place: {kind: largest(f"hisparse:{place}_tokens_{kind}") for kind in ("used", "total")}
            for place in ("host", "device")
        },
        "hit_ratio": {
            "since_start": _ratio(*map(total, pages)),
            "recent": _ratio(*map(risen, pages)),
        },
        "per_second": {name: _over(risen(of), seconds) for name, of in _RATES.items()},
        "latency_s": {
            name: _over(risen(f"sglang:{name}_seconds_sum"), risen(f"sglang:{name}_seconds_count"))
            for name in _LATENCIES
        },
        "bytes": {name: total(f"hisparse:{name}_bytes") for name in _PARTS},
        "faults": {
            name: total(f"hisparse:{name}_total")
            for name in ("invalid_scores", "malformed_selections")
        },
    }


def _over(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by is not None and by > 0 else None


def _ratio(hits: float | None, misses: float | None) -> float | None:
    return None if hits is None or misses is None else _over(hits, hits + misses)
