"""Threads for calls that may hang, and a gate that keeps late ones out of the KV pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Gate", "Workers"]

T = TypeVar("T")


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
    """Admits threads to the memory of some host pages until it is closed.

    Whoever closes it knows that no thread reads or writes these pages from then on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nobody is admitted any more."""
        return self._closed

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Yields whether the caller is admitted; it leaves at the end of the block."""
        with self._changed:
            admitted = not self._closed
            self._inside += admitted
        try:
            yield admitted
        finally:
            with self._changed:
                self._inside -= admitted
                self._changed.notify_all()

    def close(self) -> None:
        """Admit nobody any more, and wait until those inside have left."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0)
