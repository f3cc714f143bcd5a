"""Which pages of a store leave, and when."""

import math
import threading
import time
from itertools import takewhile
from typing import Final

import numpy as np

from hisparse.errors import one_line
from hisparse.storage.folder import StoreFolder
from hisparse.storage.pages import PageFile, disk_bytes
from hisparse.storage.report import StoreCounters

#: Shares of the size at which eviction begins and ends.
HIGH_WATER, LOW_WATER = 0.95, 0.85
#: Seconds between evictions that puts begin.
_PAUSE_S: Final = 1.0
#: Seconds between runs that a time to live begins.
_EACH_S: Final = 60.0
_MINUTE_NS: Final = 60 * 10**9
#: Place of a page that cannot be removed. Later times of use than the second count as that time.
_NEVER, _LATEST_NS = 2**63 - 1, 2**62


def expired_ns(ttl_s: float | None) -> float:
    """Pages that were last used at this time or before are expired, in ns since 1970; -1: none."""
    return -1 if ttl_s is None else max(0.0, (time.time() - ttl_s) * 1e9)


def _place(used_ns: int) -> int:
    """Place of a page in the order of eviction, the first to leave lowest.

    Within a minute, pages that are used later leave earlier: the end of a prefix. A time in the
    future says that the clock was set back: nobody has used the page since.
    """
    minute, rest = divmod(min(used_ns, _LATEST_NS), _MINUTE_NS)
    is_ahead = used_ns > time.time_ns() + _MINUTE_NS
    return (minute + 1) * _MINUTE_NS - 1 - rest - is_ahead * _LATEST_NS


class _Leaving:
    """Which pages leave: those that are expired, and the first ones in the order of eviction.

    Args:
        found: of all pages, see :meth:`Evictor._measure`.
        excess: bytes that are to leave.
        expired_ns: see :func:`expired_ns`.
    """

    def __init__(self, found: np.ndarray, excess: int, expired_ns: float) -> None:
        self._expired_ns, self._until = expired_ns, -(2**63)
        #: Bytes that are still to leave, and those of them with the last place: many may have it.
        self._bytes, self._last_bytes = excess, 0
        if excess > 0 and len(found):
            found = found[found["place"].argsort()]
            ends = found["num_bytes"].cumsum()
            self._until = found["place"][min(int(ends.searchsorted(excess)), len(found) - 1)]
            earlier = found["place"].searchsorted(self._until)
            self._last_bytes = excess - int(ends[earlier - 1] if earlier else 0)

    def __call__(self, page: PageFile) -> bool:
        place, num_bytes = _place(page.used_ns), disk_bytes(page.num_bytes)
        is_last = place == self._until and self._last_bytes > 0
        if not (self._bytes > 0 and (is_last or place < self._until)):
            return page.used_ns <= self._expired_ns
        self._bytes -= num_bytes
        self._last_bytes -= num_bytes * is_last
        return True


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
        self._lock, self._running, self._stopped = threading.Lock(), threading.Lock(), False
        self._not_before, self._due = 0.0, math.inf if folder.read_only else 0.0

    def run_if_due(self) -> None:
        """Run in another thread at the first call, and with a time to live once a minute."""
        if time.monotonic() >= self._due:
            self.run_soon(0)

    def run_soon(self, wanted_bytes: int) -> None:
        """Run in another thread, unless one is running or has just ended; see :meth:`run`."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if not running and not self._stopped and time.monotonic() >= self._not_before:
                thread = threading.Thread(target=self._run_alone, args=(wanted_bytes,), daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # No thread is left.
                    self._counters.warn("evict", f"cannot evict: {error}")
                    self._not_before = time.monotonic() + _PAUSE_S
                else:
                    self._thread = thread

    def stop(self) -> None:
        """End the thread, also in the middle of a scan."""
        with self._lock:
            self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _run_alone(self, wanted_bytes: int) -> None:
        start = time.monotonic()
        try:
            self.run(wanted_bytes)
        except Exception as error:  # Whatever it is, the store goes on without the eviction.
            self._counters.warn("evict", f"cannot evict: {one_line(error)}")
        finally:
            now = time.monotonic()
            self._not_before = now + _PAUSE_S
            # Scans of a large store take at most 1% of the time.
            self._due = math.inf if self._ttl_s is None else now + max(_EACH_S, 100 * (now - start))

    def run(self, wanted_bytes: int = 0, size_bytes: int | None = None) -> int:
        """Evict, as :meth:`FileStore.collect` says.

        Args:
            wanted_bytes: to free beyond what is free.
            size_bytes: evict down to this; None: by the marks of the store.

        Returns:
            Bytes given back; 0 if another process is evicting.
        """
        high = low = size_bytes
        if size_bytes is None and self._size_bytes is not None:
            high, low = (int(x * self._size_bytes) for x in (HIGH_WATER, LOW_WATER))
        with self._running, self._folder.evicting() as alone:
            if not alone:
                return 0
            # The scan may have seen what was put or removed meanwhile. Both count on top of it:
            # a sum that is too high begins another run, one that is too low none.
            added = int(self._folder.count(0)[0])
            found = self._measure()
            if self._stopped:
                return 0
            removed = int(self._folder.count(0)[1])
            num_bytes = int(found["num_bytes"].sum())
            self._folder.correct(num_bytes - added + removed)
            taken = num_bytes + wanted_bytes
            excess = taken - low if high is not None and low is not None and taken > high else 0
            evicted, given, error = 0, 0, None
            if excess or self._ttl_s is not None:
                go = _Leaving(found, excess, expired_ns(self._ttl_s))
                evicted, given, error = self._folder.remove(lambda x: not self._stopped and go(x))
            if error is not None:
                self._counters.warn(
                    "evict", f"pages stay that cannot be removed: {one_line(error)}"
                )
            self._counters.add(evicted=evicted, collected_bytes=given)
            return given

    def _measure(self) -> np.ndarray:
        """``[pages]`` of places in the order of eviction, see :func:`_place`, and bytes."""
        pages = (
            (_place(page.used_ns) if can_leave else _NEVER, disk_bytes(page.num_bytes))
            for folder in self._folder.folders()
            for can_leave in [folder.is_writable]
            for page in takewhile(lambda _: not self._stopped, folder.scan())
        )
        return np.fromiter(pages, dtype=[("place", "i8"), ("num_bytes", "i8")])
