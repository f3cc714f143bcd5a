"""``hisparse top``: what a running server does, in a table that is drawn again and again."""

from __future__ import annotations

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

from hisparse.cli.output import make_table
from hisparse.errors import ConfigError, one_line, quoted
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


_TIMEOUT_S = 10.0
#: Far more than a server with many ranks and layers sends.
_MAX_BYTES = 64 * 2**20
#: Label of a replica, and labels of its ranks. SGLang omits those that a server does not need.
_REPLICA = "dp_rank"
_RANKS = (_REPLICA, "pp_rank", "tp_rank")
#: Histograms of SGLang, in seconds.
_LATENCIES = ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
#: Memory of hisparse, in bytes.
_PARTS = (
    "host_kv",
    "host_representation",
    "host_index",
    "device_kv",
    "device_representation",
    "device_table",
)


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
        found = self.samples.get(name)
        return sum(value for _, value in found) if found else None

    def largest(self, name: str) -> float | None:
        """The largest of each replica, summed: of what the ranks of a replica count alike."""
        found: dict[str | None, float] = {}
        for labels, value in self.samples.get(name, ()):
            replica = labels.get(_REPLICA)
            found[replica] = max(found.get(replica, value), value)
        return sum(found.values()) if found else None

    def num_ranks(self, name: str) -> int:
        """Processes that report a metric."""
        found = self.samples.get(name, ())
        return len({tuple(labels.get(rank) for rank in _RANKS) for labels, _ in found})

    def labels(self, name: str, label: str) -> list[str]:
        """The values of a label, sorted."""
        found = self.samples.get(name, ())
        return sorted({labels[label] for labels, _ in found if label in labels})


def read(url: str) -> Reading:
    """Ask a server for its metrics.

    Args:
        url: of the server, such as ``http://127.0.0.1:30000``.

    Raises:
        ConfigError: there is no such server, or its metrics are not those of a server with
            hisparse.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        message = "hisparse top needs prometheus-client: pip install prometheus-client"
        raise ConfigError(message) from None
    page, now = _fetch(f"{url}/metrics"), time.monotonic()
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError):
        # The parser's own errors for a page of another kind.
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
    change = _Change(now, before)
    largest, total = now.largest, now.total
    return {
        "url": url,
        "models": now.labels("hisparse:hit_pages_total", "model_name"),
        "ranks": now.num_ranks("hisparse:hit_pages_total"),
        "seconds": round(now.time_s - before.time_s, 3),
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
            "since_start": _ratio(
                total("hisparse:hit_pages_total"), total("hisparse:miss_pages_total")
            ),
            "recent": _ratio(
                change.of("hisparse:hit_pages_total"), change.of("hisparse:miss_pages_total")
            ),
        },
        "hit_ratio_by_layer": _layer_ratios(now),
        "per_second": {
            "prompt_tokens": change.rate("sglang:prompt_tokens_total"),
            "output_tokens": change.rate("sglang:generation_tokens_total"),
            "decode_read_bytes": change.rate("hisparse:decode_read_bytes_total"),
            "prefill_read_bytes": change.rate("hisparse:prefill_read_bytes_total"),
            "written_bytes": change.rate("hisparse:written_bytes_total"),
        },
        "latency_s": {name: change.mean(f"sglang:{name}_seconds") for name in _LATENCIES},
        "bytes": {name: total(f"hisparse:{name}_bytes") for name in _PARTS},
        "faults": {
            name: total(f"hisparse:{name}_total")
            for name in ("invalid_scores", "malformed_selections")
        },
    }


class _Change:
    """What changed between two readings."""

    def __init__(self, now: Reading, before: Reading) -> None:
        self._now, self._before = now, before

    def of(self, name: str) -> float | None:
        """How far a counter rose; None: there is none, or the server started again meanwhile."""
        now, before = self._now.total(name), self._before.total(name) or 0.0
        return None if now is None or now < before else now - before

    def rate(self, name: str) -> float | None:
        """The rise of a counter in a second."""
        risen, seconds = self.of(name), self._now.time_s - self._before.time_s
        return None if risen is None or seconds <= 0 else risen / seconds

    def mean(self, name: str) -> float | None:
        """The mean of a histogram's new entries."""
        count, seconds = self.of(f"{name}_count"), self.of(f"{name}_sum")
        return seconds / count if count and seconds is not None else None


def _ratio(hits: float | None, misses: float | None) -> float | None:
    return None if hits is None or misses is None or hits + misses == 0 else hits / (hits + misses)


def _layer_ratios(now: Reading) -> dict[str, float | None]:
    """Hit ratio since the start by layer; empty if the server does not count layers."""

    def pages(kind: str, layer: str) -> float:
        found = now.samples.get(f"hisparse:layer_{kind}_pages_total", ())
        return sum(value for labels, value in found if labels.get("layer") == layer)

    layers = now.labels("hisparse:layer_hit_pages_total", "layer")
    numbers = sorted((layer for layer in layers if layer.isdecimal()), key=int)
    return {layer: _ratio(pages("hit", layer), pages("miss", layer)) for layer in numbers}
