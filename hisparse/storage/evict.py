"""Which pages of a store leave, and when."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from hisparse.errors import HiSparseError, one_line
from hisparse.storage.contexts import Contexts, contexts_path
from hisparse.storage.folder import StoreFolder
from hisparse.storage.pages import disk_bytes
from hisparse.storage.report import StoreCounters

logger = logging.getLogger(__name__)

#: Shares of the size at which eviction begins and ends.
HIGH_WATER, LOW_WATER = 0.95, 0.85
#: Seconds between evictions that puts begin.
_PAUSE_S: Final = 1.0


def expired_ns(ttl_s: float | None) -> float:
    """Pages that were last used at this time or before are expired, in ns since 1970; -1: none."""
    return -1 if ttl_s is None else (time.time() - ttl_s) * 1e9


class Evictor:
    """Evicts pages of a store; see :class:`FileStore`. Any thread may call its methods."""

    def __init__(
        self,
        folder: StoreFolder,
        size_bytes: int | None,
        ttl_s: float | None,
        counters: StoreCounters,
    ) -> None:
        self._folder, self._counters = folder, counters
        self._size_bytes, self._ttl_s = size_bytes, ttl_s
        self._thread: threading.Thread | None = None
        self._lock, self._not_before = threading.Lock(), 0.0

    def run_soon(self, room: int) -> None:
        """Evict in another thread, unless one is running or has just ended; see :meth:`run`."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if not running and time.monotonic() >= self._not_before:
                self._thread = threading.Thread(target=self._run_alone, args=(room,), daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _run_alone(self, room: int) -> None:
        try:
            self.run(room)
        except OSError as error:
            logger.warning("store %s: cannot evict: %s", self._folder.path, one_line(error))
        self._not_before = time.monotonic() + _PAUSE_S

    def run(self, room: int = 0, size_bytes: int | None = None) -> int:
        """Evict, as :meth:`FileStore.collect` says; contexts whose pages have all left go too.

        Args:
            room: bytes that are wanted in addition to those that are free.
            size_bytes: evict down to this; None: by the marks of the store.

        Returns:
            Bytes given back; 0 if another thread or process is evicting.
        """
        high = low = size_bytes
        if size_bytes is None and self._size_bytes is not None:
            high, low = (int(x * self._size_bytes) for x in (HIGH_WATER, LOW_WATER))
        with self._folder.evicting() as alone:
            if not alone:
                return 0
            used_ns, num_bytes = self._measure()
            # Processes that were killed have counted pages that they did not write.
            counted = self._folder.add_bytes(0)
            counted = self._folder.add_bytes(int(num_bytes.sum()) - counted)
            taken = counted + self._folder.context_bytes + room
            until_ns = expired_ns(self._ttl_s)
            if high is not None and low is not None and taken > high and len(used_ns):
                given_back = num_bytes.cumsum()
                last = min(int(given_back.searchsorted(taken - low)), len(used_ns) - 1)
                until_ns = max(until_ns, used_ns[last])
            evicted, given = self._folder.remove_unused(until_ns) if until_ns >= 0 else (0, 0)
            self._counters.add(evicted=evicted, collected_bytes=given)
            self._forget_contexts()
            return given

    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """``[pages] int64`` each, the least recently used first: times of use, bytes."""
        pages = ((page.used_ns, disk_bytes(page.num_bytes)) for _, page in self._folder.scan())
        found = np.fromiter(pages, dtype=[("used_ns", "i8"), ("num_bytes", "i8")])
        found = found[found["used_ns"].argsort()]
        return found["used_ns"], found["num_bytes"]

    def _forget_contexts(self) -> None:
        """Remove contexts whose pages have all left."""
        if not contexts_path(self._folder.path).exists():
            return

        def stored(namespace: str, keys: Sequence[bytes]) -> list[bool]:
            folder = self._folder.folder(namespace)
            return [folder is not None and folder.has(key.hex()) for key in keys]

        try:
            with contextlib.closing(Contexts(self._folder.path, None)) as contexts:
                contexts.forget_absent(stored)
        except HiSparseError as error:
            self._counters.warn("contexts", str(error))
