"""Calls to a store that may fail, hang or be slow: a time limit, and a pause after each fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import Final, TypeVar

from hisparse.errors import one_line
from hisparse.sglang.features.storage.counters import StorageCounters
from hisparse.sglang.features.storage.threads import Workers

__all__ = ["StorageHealth"]

logger = logging.getLogger("hisparse")

T = TypeVar("T")

#: A store has so many bytes a second for a call, on top of ``timeout_s``.
_MIN_RATE: Final = 256 * 2**20
#: Seconds without calls after a fault; doubled by each further fault up to the second number.
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0


class StorageHealth:
    """Runs calls in threads, and leaves a store alone for a while after it failed or was late.

    Args:
        counters: counts late calls and errors.
        timeout_s: limit of a call that moves no bytes, in seconds.
    """

    def __init__(self, counters: StorageCounters, timeout_s: float) -> None:
        self._counters = counters
        self.timeout_s = timeout_s
        self._pause_s = 0.0
        self._resume_at = 0.0

    def is_usable(self, workers: Workers) -> bool:
        """Whether to call the store: no pause lasts, and ``workers`` are not all in late calls."""
        return time.monotonic() >= self._resume_at and not workers.are_stuck(self.timeout_s)

    def limit_s(self, num_bytes: int) -> float:
        """Time limit of a call that moves ``num_bytes``, in seconds."""
        return self.timeout_s + num_bytes / _MIN_RATE

    def call(self, workers: Workers, task: Callable[[], T], num_bytes: int = 0) -> T | None:
        """The result of ``task``, run by ``workers``; None: it failed or was late."""
        limit_s = self.limit_s(num_bytes)
        return self.result(workers.submit(task), time.monotonic() + limit_s, limit_s)

    def result(self, future: Future[T], end: float, limit_s: float) -> T | None:
        """The result of a call; None: it failed, or was not there at the time ``end``.

        Args:
            future: the call.
            end: of the monotonic clock, seconds.
            limit_s: how long the call had, for the log.
        """
        try:
            found = future.result(max(0.0, end - time.monotonic()))
        except Exception as error:
            # A backend may raise the same type for a time limit of its own.
            if not isinstance(error, LateError) or (future.done() and future.exception() is error):
                self._counters.add(errors=1)
                self._pause(one_line(error))
                return None
            self._counters.add(late_calls=1)
            self._pause(f"a call took more than {limit_s:.1f} s (timeout_s is {self.timeout_s:g})")
            return None
        self._pause_s = 0.0
        return found

    def _pause(self, why: str) -> None:
        # Calls that were under way together fail together.
        if time.monotonic() < self._resume_at:
            return
        self._pause_s = min(2 * self._pause_s or _PAUSE_S, _MAX_PAUSE_S)
        self._resume_at = time.monotonic() + self._pause_s
        logger.warning(
            "hisparse: storage: %s; prompts are computed without the store for %.0f s",
            why,
            self._pause_s,
        )
