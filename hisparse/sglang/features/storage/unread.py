"""Records that a store says it has, and that could not be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

__all__ = ["UnreadKeys"]

#: Seconds for which a record counts as absent, and the most such records.
_SECONDS: Final = 60.0
_MAX_KEYS: Final = 65536


class UnreadKeys:
    """Keys that count as absent for a while: no load asks for them, and an offload replaces them.

    Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def add(self, keys: Iterable[str]) -> None:
        """Note records that could not be read."""
        until = time.monotonic() + _SECONDS
        with self._lock:
            self._expire()
            for key in keys if len(self._until) < _MAX_KEYS else ():
                self._until.pop(key, None)  # The oldest stay first.
                self._until[key] = until

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records that were written again."""
        with self._lock:
            for key in keys if self._until else ():
                self._until.pop(key, None)

    def first(self, keys: Sequence[str]) -> int:
        """Index of the first key that counts as absent; their number if none does."""
        with self._lock:
            self._expire()
            if not self._until or self._until.keys().isdisjoint(keys):
                return len(keys)
            return next(i for i, key in enumerate(keys) if key in self._until)

    def _expire(self) -> None:
        now = time.monotonic()
        for key in list(takewhile(lambda key: self._until[key] <= now, self._until)):
            del self._until[key]
