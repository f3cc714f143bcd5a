"""The report of a load benchmark: the JSON of all benchmarks with more fields, and tables."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.error import HTTPError

from rich import box
from rich.console import Console
from rich.table import Table

from hisparse.units import format_bytes
from hisparse_bench.report import Case, Report, Result
from hisparse_bench.server import ServerClient

#: The gate of a server that nothing is compared with.
UNCHECKED = "not checked"
_CPU_NOTE = (
    "On a CPU dense SGLang (torch_native) computes a cached prefix again in each prefill. Its TTFT "
    "and tokens/s contain that; its time per token only where a prefill ran between two steps."
)


_DEVICE = ("device_kv_bytes", "device_representation_bytes", "device_table_bytes")
_HOST = ("host_kv_bytes", "host_representation_bytes")
_MOVED = ("hit_pages", "miss_pages", "decode_read_bytes", "prefill_read_bytes", "written_bytes")
#: Metrics are published when a request ends, by another process than the one that answers.
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Usage:
    """A server's state at one time.

    Attributes:
        metrics: Prometheus metrics, summed over label sets.
        kv_tokens: capacity of its KV cache.
    """

    metrics: Mapping[str, float]
    kv_tokens: int

    @classmethod
    def read(cls, server: ServerClient) -> Usage:
        """Ask an idle server."""
        time.sleep(_SETTLE_S)
        memory = server.info()["internal_states"][0]["memory_usage"]
        metrics = {}
        with suppress(HTTPError):  # It runs without --enable-metrics.
            metrics = server.metrics()
        return cls(metrics, int(memory["token_capacity"]))

    @property
    def is_hisparse(self) -> bool:
        """Whether hisparse serves."""
        return "hisparse:device_kv_bytes" in self.metrics

    def memory(self, kv_token_bytes: int) -> dict[str, int]:
        """Bytes of the KV cache; those of a dense one are tokens times ``kv_token_bytes``."""
        if not self.is_hisparse:
            device, host = self.kv_tokens * kv_token_bytes, 0
        else:
            device, host = (
                int(sum(self.metrics[f"hisparse:{name}"] for name in names))
                for names in (_DEVICE, _HOST)
            )
        return {"device_bytes": device, "host_bytes": host, "kv_tokens": self.kv_tokens}

    def moved_since(self, before: Usage) -> dict[str, float]:
        """Hits, misses, bytes moved and, if a page was selected, the hit ratio, since then."""
        if not self.is_hisparse:
            return {}
        found = {}
        for name in _MOVED:
            key = f"hisparse:{name}_total"
            found[name] = self.metrics.get(key, 0.0) - before.metrics.get(key, 0.0)
        selected = found["hit_pages"] + found["miss_pages"]
        return found | ({"hit_ratio": found["hit_pages"] / selected} if selected else {})


@dataclass(frozen=True, kw_only=True)
class LoadResult(Result):
    """One contender under one load. ``median_us`` to ``p90_us`` are times per token.

    Attributes:
        load: what SGLang's client measured, under its names.
        memory: ``device_bytes`` and ``host_bytes`` of the KV cache and all that belongs to it, as
            the server reports them, and ``kv_tokens``, its capacity.
        cache: hits, misses and bytes moved during the load, and ``hit_ratio`` if a page was
            selected; empty without hisparse.
        quality: distance from dense decoding, ``kl``, ``agreement`` and ``positions``; empty for
            the dense server and where nothing was compared.
    """

    load: dict[str, Any]
    memory: dict[str, int]
    cache: dict[str, float] = field(default_factory=dict)
    quality: dict[str, float] = field(default_factory=dict)

    @property
    def throughput(self) -> float:
        """Output tokens per second; 0 if no request was completed."""
        return float(self.load.get("output_throughput", 0.0))


@dataclass(frozen=True, kw_only=True)
class LoadReport(Report):
    """All loads of one run.

    Attributes:
        recipe: title and statements of the recipe that was run; empty without one.
        interrupted: whether the run ended early; ``cases`` holds what was finished.
        seconds: how long the run took.
    """

    recipe: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0

    def to_json(self) -> str:
        """The report as one JSON object; no figures of a case whose gate failed."""
        found = asdict(self)
        for case, entry in zip(self.cases, found["cases"], strict=True):
            entry["ratios"] = _ratios(case, "median_us")
            entry["throughput_ratios"] = _ratios(case, "throughput")
            if case.gate == "failed":
                entry["results"] = []
            for result in entry["results"]:
                if not result["load"]["completed"]:
                    result |= dict.fromkeys(("median_us", "p10_us", "p90_us"))
        return json.dumps(found, indent=2)

    def print_table(self, console: Console) -> None:
        """Print a table for each load."""
        console.print(self.title, style="italic", highlight=False)
        for name, text in self.recipe.items():
            console.print(f"{name}: {text}", highlight=False, markup=False)
        for case in self.cases:
            console.print(f"\n{case.name}", style="bold", highlight=False)
            if case.gate == "failed":
                console.print(f"the check failed, no figures: {case.params.get('failure', '')}")
                continue
            if case.gate == UNCHECKED:
                console.print("not checked against dense decoding, so no ratios")
            results = [x for x in case.results if isinstance(x, LoadResult)]
            console.print(_speeds(results))
            console.print(_sizes(results))
            for failure in case.params.get("failures", {}).items():
                console.print("{}: {}".format(*failure), markup=False, highlight=False)
            for what, name in (("output tokens/s", "throughput"), ("time per token", "median_us")):
                if ratios := _ratios(case, name):
                    text = ", ".join(f"{pair} {ratio}" for pair, ratio in ratios.items())
                    console.print(f"{what}: {text}", highlight=False)
        if self.device == "cpu" and any(x.impl == "dense" for y in self.cases for x in y.results):
            console.print(f"\n{_CPU_NOTE}", highlight=False)
        if self.interrupted:
            console.print("\ninterrupted: later loads are missing")


def _ratios(case: Case, name: str) -> dict[str, float]:
    """``a/b``: a's value over b's, of loads with an answer; none unless the gate passed."""
    if case.gate != "passed":
        return {}
    results = [x for x in case.results if isinstance(x, LoadResult) and x.throughput]
    return {
        f"{a.impl}/{b.impl}": float(f"{getattr(a, name) / getattr(b, name):.4g}")
        for i, a in enumerate(results)
        for b in results[i + 1 :]
    }


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(heads[0], overflow="fold")
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _speeds(results: Sequence[LoadResult]) -> Table:
    heads = ("in/s", "out/s", "TTFT", "p99", "token", "p99", "whole", "p99", "good/s", "done")
    table = _table("", *heads)
    for result in results:
        load = result.load
        done = f"{load['completed']}/{load['completed'] + load['failed']}"
        if not load["completed"]:
            table.add_row(result.impl, *[""] * 9, done)
            continue
        times = [
            _ms(load[f"{statistic}_{of}_ms"])
            for of in ("ttft", "tpot", "e2e_latency")
            for statistic in ("median", "p99")
        ]
        rates = [f"{load[name]:.4g}" for name in ("input_throughput", "output_throughput")]
        good = f"{load['request_goodput']:.3g}" if "request_goodput" in load else ""
        table.add_row(result.impl, *rates, *times, good, done)
    return table


def _sizes(results: Sequence[LoadResult]) -> Table:
    table = _table("", "device", "host", "KV tokens", "hits", "read", "KL", "agree")
    for result in results:
        memory, cache, quality = result.memory, result.cache, result.quality
        table.add_row(
            result.impl,
            format_bytes(memory["device_bytes"]),
            format_bytes(memory["host_bytes"]) if memory["host_bytes"] else "",
            f"{memory['kv_tokens']:,}",
            f"{cache['hit_ratio']:.1%}" if "hit_ratio" in cache else "",
            format_bytes(int(cache["decode_read_bytes"])) if cache else "",
            f"{quality['kl']:.3g}" if quality else "",
            f"{quality['agreement']:.0%}" if quality else "",
        )
    return table


def _ms(value: float) -> str:
    return f"{value / 1e3:.3g}s" if value >= 1e3 else f"{value:.3g}ms"
