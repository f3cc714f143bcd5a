"""Which pages were read, until the index is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Final

#: Number of the namespace, and key.
Page = tuple[int, bytes]

#: Pages, and seconds, after which the index is to be told.
_MOST: Final = 1024
_PERIOD_S: Final = 10.0


class RecentUses:
    """Pages that were read: the last second, and the number of times. Safe in any thread."""

    def __init__(self) -> None:
        self._uses: dict[Page, tuple[int, int]] = {}
        self._lock, self._due_at = threading.Lock(), 0.0

    def add(self, pages: Iterable[Page], now: float) -> bool:
        """Note reads at ``now``, seconds since 1970. Returns whether the index is to be told."""
        with self._lock:
            for page in pages:
                self._uses[page] = int(now), self._uses.get(page, (0, 0))[1] + 1
            return len(self._uses) > _MOST or time.monotonic() > self._due_at

    def last(self, page: Page) -> int:
        """When a page was last read, seconds since 1970; 0 if the index knows."""
        return self._uses.get(page, (0, 0))[0]

    def take(self) -> dict[Page, tuple[int, int]]:
        """All of them, which are forgotten here."""
        with self._lock:
            uses, self._uses = self._uses, {}
            self._due_at = time.monotonic() + _PERIOD_S
            return uses

    def give_back(self, uses: dict[Page, tuple[int, int]]) -> None:
        """Keep what the index could not take."""
        with self._lock:
            self._uses = uses | self._uses
