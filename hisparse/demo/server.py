"""The demo's server: chat requests, and the size of the KV pool."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from hisparse.errors import HiSparseError
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
