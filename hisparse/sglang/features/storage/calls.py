"""Calls to a store that may fail, hang or be slow, and what is counted of them.

Calls run in threads with a time limit. After a failure no calls are made for a while, and a call
that is late cannot touch the KV pool.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from hisparse.errors import one_line

logger = logging.getLogger("hisparse")

T = TypeVar("T")

#: Bytes a second that a store must reach: a call has ``timeout_s`` and the time for its bytes.
_MIN_RATE: Final = 256 * 2**20
#: Seconds without calls after a fault; doubled by each further fault up to the second number.
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0

#: Name of each counter, and what it counts.
COUNTERS: Final = {
    "storage_found_pages": "Pages that lookups found; a waiting request repeats its lookup",
    "storage_absent_pages": "Pages that lookups did not find; a waiting request repeats its lookup",
    "storage_loaded_pages": "Pages read from the store into host memory",
    "storage_loaded_bytes": "Bytes read from the store into host memory",
    "storage_load_ms": "Time that loads took, in milliseconds",
    "storage_built_pages": "Loaded pages whose representations are built from their keys",
    "storage_failed_loads": "Loads that did not get all pages; their requests compute the prompt",
    "storage_damaged_pages": "Pages that were read with a wrong checksum, and not used",
    "storage_lost_pages": "Pages that were looked up and found, and then not read",
    "storage_offloaded_pages": "Pages written to the store",
    "storage_offloaded_bytes": "Bytes written to the store",
    "storage_known_pages": "Pages that were not written because the store has them",
    "storage_inexact_pages": "Pages that were not written because sparse steps led to them",
    "storage_failed_offloads": "Groups of pages that were not written, or not all of them",
    "storage_swapped_pages": "Pages of retracted requests that were written to the store",
    "storage_swapped_in_pages": "Pages of retracted requests that were read back",
    "storage_failed_swaps": "Retracted requests whose pages were not written, or not read back",
    "storage_late_calls": "Calls to the store that took longer than timeout_s",
    "storage_errors": "Calls to the store that ended with an error",
}


class StorageCounters:
    """Totals since the start; threads may add at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(COUNTERS, 0)

    def add(self, **amounts: int) -> None:
        """Add to counters, named without ``storage_``."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[f"storage_{name}"] += amount

    def totals(self) -> dict[str, int]:
        """All totals, by the names of :data:`COUNTERS`."""
        with self._lock:
            return dict(self._totals)


class Workers:
    """Daemon threads that run tasks in the order in which they came.

    A process that ends does not wait for them, so a task that hangs for ever does no harm there.

    Args:
        count: number of threads.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._began: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name=f"{name}-{i}")
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run ``task`` in one of the threads."""
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def are_stuck(self, after_s: float) -> bool:
        """Whether each thread has been in one task for longer than ``after_s`` seconds."""
        now = time.monotonic()
        began = list(self._began.values())
        return len(began) == len(self._threads) and all(now - t > after_s for t in began)

    def close(self) -> None:
        """End the threads after the tasks so far; does not wait."""
        for _ in self._threads:
            self._tasks.put(None)

    def _run(self) -> None:
        me = threading.get_ident()
        while (entry := self._tasks.get()) is not None:
            future, task = entry
            self._began[me] = time.monotonic()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            finally:
                del self._began[me]


class Gate:
    """Admits one thread at a time to the memory of some host pages, until it is closed.

    Attributes:
        closed: whether no thread is admitted any more: none reads or writes these pages.
    """

    def __init__(self) -> None:
        self._lock, self.closed = threading.Lock(), False

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Yields whether the caller is admitted; it leaves at the end of the block."""
        with self._lock:
            yield not self.closed

    def close(self) -> None:
        """Admit no more threads, and wait until the one inside has left."""
        with self._lock:
            self.closed = True


class StorageHealth:
    """Runs calls in threads, and makes none for a while after one failed or was late.

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
