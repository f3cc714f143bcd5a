"""How fast a server's prefill is, from the prefills that it runs anyway."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any, Final

import torch

__all__ = ["LEAST_TOKENS", "PrefillRate"]

#: Tokens of a prefill that is timed: the fixed cost of a forward hides the rate of a shorter one.
LEAST_TOKENS: Final = 128
#: The rate is the median of so many prefills: the first ones may build kernels.
_MOST: Final = 15


class PrefillRate:
    """Times prefills, on a GPU by events, for which nobody waits.

    Args:
        device_type: where forwards run, such as "cuda" or "cpu".
    """

    def __init__(self, device_type: str) -> None:
        self._on_gpu = device_type == "cuda"
        self._rates: deque[float] = deque(maxlen=_MOST)
        self._running: tuple[int, Any] | None = None
        #: Tokens, start and end of prefills that the GPU may not have finished.
        self._pending: deque[tuple[int, Any, Any]] = deque(maxlen=_MOST)

    def begin(self, num_tokens: int) -> None:
        """A forward begins that computes ``num_tokens`` of prompts."""
        self._running = (num_tokens, self._now()) if num_tokens >= LEAST_TOKENS else None

    def end(self) -> None:
        """The forward ends."""
        if self._running is not None:
            num_tokens, start = self._running
            self._pending.append((num_tokens, start, self._now()))
            self._running = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None: no prefill of at least :data:`LEAST_TOKENS` has ended."""
        while self._pending and (not self._on_gpu or self._pending[0][2].query()):
            num_tokens, start, end = self._pending.popleft()
            seconds = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            if seconds > 0:
                self._rates.append(num_tokens / seconds)
        return statistics.median(self._rates) if self._rates else None

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
