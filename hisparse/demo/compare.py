"""Run both servers of the demo, one after the other, and measure them."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hisparse.config import HiSparseConfig
from hisparse.demo.document import HARBOUR, make_prompt
from hisparse.errors import HiSparseError
from hisparse.units import format_bytes
from hisparse_bench.server import ServerProcess


@dataclass
class Answer:
    """A streamed chat answer.

    Attributes:
        text: generated so far.
        times_s: arrival of each piece of text, seconds since the request was sent.
        prompt_tokens: tokens of the prompt with the chat template.
    """

    text: str = ""
    times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first piece of text, seconds."""
        return self.times_s[0]

    @property
    def time_per_token_s(self) -> float:
        """Median time between two pieces, seconds; a piece is a token or, rarely, a few."""
        return median(b - a for a, b in pairwise(self.times_s)) if self.times_s[1:] else 0.0


class DemoServer(ServerProcess):
    """A server with a chat request; Ctrl-C does not interrupt :meth:`stop`."""

    def __enter__(self) -> DemoServer:
        return self

    def stop(self) -> None:
        """Stop the server; ignore Ctrl-C until no process is left."""
        with _ctrl_c_ignored():
            super().stop()

    def chat(self, prompt: str, max_tokens: int) -> Iterator[Answer]:
        """Stream a greedy answer; yield the answer so far at each new piece of text."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, started = Answer(), time.perf_counter()
        with self._open("/v1/chat/completions", body) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if usage := event.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                if piece := _piece(event):
                    answer.text += piece
                    answer.times_s.append(time.perf_counter() - started)
                    yield answer
        if not answer.times_s:
            raise HiSparseError("the server's answer is empty; expected at least one token")

    def kv_pool(self) -> tuple[int, int]:
        """Tokens and bytes of the KV pool as SGLang reports them, bytes rounded to 1 MiB."""
        memory = self.info()["internal_states"][0]["memory_usage"]
        return memory["token_capacity"], round(memory["kvcache"] * 1024) * 2**20


def _piece(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_report(
    console: Console, dense: Measurement, sparse: Measurement, *, on_cpu: bool
) -> None:
    """Print a table with a column for each server."""
    table = Table(title=f"{sparse.answer.prompt_tokens:,} tokens, then: {HARBOUR.question}")
    table.add_column()
    for setup in server_setups():
        table.add_column(setup.title)
    right = _cells(sparse)
    for label, cell in _cells(dense).items():
        table.add_row(label, cell, right[label])
    console.print(table)
    if on_cpu:
        console.print(
            "This machine has no GPU: device memory is a part of host memory, and transfers are "
            "copies within it.",
            style="dim",
        )


def _cells(measurement: Measurement) -> dict[str, Text]:
    answer, ratio = measurement.answer, measurement.hit_ratio
    is_correct = HARBOUR.is_found_in(answer.text)
    summaries, host = measurement.scoring_bytes, measurement.host_bytes
    plain = {
        "time to first token": f"{answer.ttft_s:.1f} s",
        "time per token": f"{1000 * answer.time_per_token_s:.0f} ms",
        "KV capacity, tokens": f"{measurement.kv_tokens:,}",
        "device memory for KV": format_bytes(measurement.device_bytes),
        "summaries and tables": format_bytes(summaries) if summaries else "none",
        "host memory for KV": format_bytes(host) if host else "none",
        "hit ratio": "" if ratio is None else f"{ratio:.3f}",
    }
    return {
        "answer": Text(answer.text.strip()),
        "correct": Text("yes" if is_correct else "no", style="green" if is_correct else "red"),
        **{label: Text(value) for label, value in plain.items()},
    }


#: The value of ``--hisparse-config``.
CONFIG: Final[Mapping[str, Any]] = {
    "budget": 512,
    "device_buffer_size": 1024,
    "max_row_capacity": 1024,
    "host_memory": "2GiB",
    "device_memory": "512MiB",
}
#: Capacity of both servers' KV pools, so that their bytes can be compared.
_KV_TOKENS: Final = 32768
#: Place of the planted sentence, from 0 (beginning) to 1 (end).
_DEPTH: Final = 0.8
_MAX_NEW_TOKENS: Final = 48


class ServerSetup(NamedTuple):
    """One of the two servers to compare: the head of its column, and SGLang's flags."""

    title: str
    flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Answer, times and memory of one server.

    Attributes:
        answer: the answer and its times.
        kv_tokens: capacity of the KV pool.
        device_bytes: device memory for K and V.
        scoring_bytes: device memory for page summaries and tables.
        host_bytes: host memory for K and V.
        hit_ratio: fraction of the pages selected by this request's decode steps that were resident;
            None for the dense server.
    """

    answer: Answer
    kv_tokens: int
    device_bytes: int
    scoring_bytes: int = 0
    host_bytes: int = 0
    hit_ratio: float | None = None


def server_setups() -> tuple[ServerSetup, ServerSetup]:
    """The dense server and hisparse, on the GPU if there is one."""
    common = ["--max-total-tokens", str(_KV_TOKENS), "--chunked-prefill-size", "8192"]
    common += ["--skip-server-warmup", "--sleep-on-idle"]
    if not torch.cuda.is_available():
        common += ["--device", "cpu", "--dtype", "float32"]
    dense = (*common, "--attention-backend", "torch_native")
    sparse = (*common, "--attention-backend", "hisparse", "--hisparse-config", json.dumps(CONFIG))
    config = HiSparseConfig.from_dict(CONFIG)
    title = f"hisparse ({config.algorithm}, budget {config.budget})"
    return (
        ServerSetup("dense (torch_native)", dense),
        ServerSetup(title, sparse),
    )


def measure(setup: ServerSetup, model: str, num_threads: int, console: Console) -> Measurement:
    """Start a server, ask about the document, read its memory use, and stop it."""
    with (
        tempfile.TemporaryDirectory(prefix="hisparse-demo-") as folder,
        DemoServer(model, Path(folder) / "sglang.log", setup.flags) as server,
    ):
        with _spinner(console, f"{setup.title}: starting SGLang"):
            on_cpu = not torch.cuda.is_available()
            server.start(ServerProcess.cpu_environment(num_threads) if on_cpu else {})
            for _ in server.chat("Hello!", max_tokens=2):
                pass
        before = server.metrics()
        answer = _ask(server, setup, console)
        kv_tokens, pool_bytes = server.kv_pool()
        if "--hisparse-config" not in setup.flags:
            return Measurement(answer=answer, kv_tokens=kv_tokens, device_bytes=pool_bytes)
        after = _metrics_of_request(server, before)
        hits, misses = (_increase(before, after, name) for name in ("hit_pages", "miss_pages"))
        return Measurement(
            answer=answer,
            kv_tokens=kv_tokens,
            device_bytes=int(after["hisparse:device_kv_bytes"]),
            scoring_bytes=int(
                after["hisparse:device_representation_bytes"] + after["hisparse:device_table_bytes"]
            ),
            host_bytes=int(after["hisparse:host_kv_bytes"]),
            hit_ratio=hits / (hits + misses) if hits + misses else None,
        )


def _ask(server: DemoServer, setup: ServerSetup, console: Console) -> Answer:
    stream = server.chat(make_prompt(HARBOUR, _DEPTH), _MAX_NEW_TOKENS)
    with _spinner(console, f"{setup.title}: reading the document (prefill)"):
        answer = next(stream)
    console.print(f"{setup.title}: ", end="", style="bold")
    console.out(answer.text, end="", highlight=False)
    shown = len(answer.text)
    for answer in stream:
        console.out(answer.text[shown:], end="", highlight=False)
        shown = len(answer.text)
    console.print()
    return answer


def _metrics_of_request(server: DemoServer, before: Mapping[str, float]) -> dict[str, float]:
    """Wait for metrics that include the request, which are published when it ends."""
    end = time.monotonic() + 5
    while True:
        after = server.metrics()
        if _increase(before, after, "selected_tokens") or time.monotonic() > end:
            return after
        time.sleep(0.2)


def _increase(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    key = f"hisparse:{name}_total"
    return after[key] - before.get(key, 0.0)


@contextmanager
def _spinner(console: Console, text: str) -> Iterator[None]:
    """Show a spinner, then the time; two lines if the output is not a terminal."""
    started = time.monotonic()
    if not console.is_terminal:
        console.print(text)
    with console.status(text):
        yield
    console.print(f"{text}: {time.monotonic() - started:.0f} s", style="dim")
