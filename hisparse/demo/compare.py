"""Runs both sides of the demo, one after the other, and measures them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hisparse.demo.document import HARBOUR, make_prompt
from hisparse.demo.server import Answer, DemoServer
from hisparse_bench.server import ServerProcess

__all__ = ["CONFIG", "Measured", "Side", "measure", "sides"]

#: What `--hisparse-config` is given.
CONFIG: Final[Mapping[str, Any]] = {
    "algorithm": "quest",
    "budget": 512,
    "device_buffer_size": 1024,
    "max_row_capacity": 1024,
    "host_memory": "2GiB",
    "device_memory": "512MiB",
}
#: Room for this many tokens on both sides, so that their KV bytes can be compared.
_KV_TOKENS: Final = 32768
_DEPTH: Final = 0.8
_MAX_NEW_TOKENS: Final = 48


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two servers that are compared."""

    title: str
    flags: tuple[str, ...]
    sparse: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one side did.

    Attributes:
        answer: with its times.
        kv_tokens: that the KV pool has room for.
        device_bytes: of K and V on the device.
        scoring_bytes: of page summaries and tables on the device.
        host_bytes: of K and V in host memory.
        hit_ratio: hits among the pages that this request's decode steps selected.
    """

    answer: Answer
    kv_tokens: int
    device_bytes: int
    scoring_bytes: int = 0
    host_bytes: int = 0
    hit_ratio: float | None = None


def sides() -> tuple[Side, Side]:
    """The dense side and hisparse, on the GPU where there is one."""
    common = ["--max-total-tokens", str(_KV_TOKENS), "--chunked-prefill-size", "8192"]
    common += ["--skip-server-warmup", "--sleep-on-idle"]
    if not torch.cuda.is_available():
        common += ["--device", "cpu", "--dtype", "float32"]
    dense = (*common, "--attention-backend", "torch_native")
    sparse = (*common, "--attention-backend", "hisparse", "--hisparse-config", json.dumps(CONFIG))
    title = f"hisparse ({CONFIG['algorithm']}, budget {CONFIG['budget']})"
    return (
        Side(title="dense (torch_native)", flags=dense, sparse=False),
        Side(title=title, flags=sparse, sparse=True),
    )


def measure(side: Side, model: str, num_threads: int, console: Console) -> Measured:
    """Start a server, ask it about the document, read what it used, and stop it."""
    with (
        tempfile.TemporaryDirectory(prefix="hisparse-demo-") as folder,
        DemoServer(model, Path(folder) / "sglang.log", side.flags) as server,
    ):
        with _busy(console, f"{side.title}: starting SGLang"):
            on_cpu = not torch.cuda.is_available()
            server.start(ServerProcess.cpu_environment(num_threads) if on_cpu else {})
            for _ in server.chat("Hello!", max_tokens=2):
                pass
        before = server.metrics()
        answer = _ask(server, side, console)
        kv_tokens, pool_bytes = server.kv_pool()
        if not side.sparse:
            return Measured(answer=answer, kv_tokens=kv_tokens, device_bytes=pool_bytes)
        after = _metrics_of_request(server, before)
        hits, misses = (_grown(before, after, name) for name in ("hit_pages", "miss_pages"))
        return Measured(
            answer=answer,
            kv_tokens=kv_tokens,
            device_bytes=int(after["hisparse:device_kv_bytes"]),
            scoring_bytes=int(
                after["hisparse:device_representation_bytes"] + after["hisparse:device_table_bytes"]
            ),
            host_bytes=int(after["hisparse:host_kv_bytes"]),
            hit_ratio=hits / (hits + misses) if hits + misses else None,
        )


def _ask(server: DemoServer, side: Side, console: Console) -> Answer:
    stream = server.chat(make_prompt(HARBOUR, _DEPTH), _MAX_NEW_TOKENS)
    with _busy(console, f"{side.title}: reading the document (prefill)"):
        answer = next(stream)
    console.print(f"{side.title}: ", end="", style="bold")
    console.out(answer.text, end="", highlight=False)
    shown = len(answer.text)
    for answer in stream:
        console.out(answer.text[shown:], end="", highlight=False)
        shown = len(answer.text)
    console.print()
    return answer


def _metrics_of_request(server: DemoServer, before: Mapping[str, float]) -> dict[str, float]:
    """Metrics once they count the request's decode steps; they are published as it ends."""
    end = time.monotonic() + 5
    while True:
        after = server.metrics()
        if _grown(before, after, "selected_tokens") or time.monotonic() > end:
            return after
        time.sleep(0.2)


def _grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    key = f"hisparse:{name}_total"
    return after[key] - before.get(key, 0.0)


@contextmanager
def _busy(console: Console, text: str) -> Iterator[None]:
    """A spinner with the time that has passed; on no terminal two lines."""
    started = time.monotonic()
    if not console.is_terminal:
        console.print(text)
        yield
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(text, total=None)
            yield
    console.print(f"{text}: {time.monotonic() - started:.0f} s", style="dim")
