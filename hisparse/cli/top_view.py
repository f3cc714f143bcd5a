"""What ``hisparse top`` shows: two readings of a server's metrics, and the change between them."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hisparse.errors import ConfigError, one_line, quoted

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
