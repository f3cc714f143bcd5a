"""Records that a store says it has, and that could not be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
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
            if len(self._until) < _MAX_KEYS:
                self._until.update(dict.fromkeys(keys, until))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records that were written again."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def first(self, keys: Sequence[str]) -> int:
        """Index of the first key that counts as absent; their number if none does."""
        with self._lock:
            if not self._until:
                return len(keys)
            now = time.monotonic()
            self._until = {key: until for key, until in self._until.items() if until > now}
            return next((i for i, key in enumerate(keys) if key in self._until), len(keys))
