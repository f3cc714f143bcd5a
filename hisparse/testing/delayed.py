"""Side streams whose work is done as early, as late or in as odd an order as they allow.

A side stream promises an order only between a start and a join. Here the work is done anywhere in
between, so that a result that depends on more than was declared is another one than in line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from hisparse.cache.streams import Lane, Pending, SideStreams

__all__ = ["DelayedStreams", "Order"]

T = TypeVar("T")

#: When work is done: "early" when it is started; "late" when it is joined, or work of its lane
#: that was started after it; a seed: in between, at any call of :class:`DelayedStreams`.
Order = Literal["early", "late"] | int


class DelayedStreams(SideStreams):
    """Does side work at another time than in line.

    Args:
        order: when.

    Attributes:
        num_started: works so far.
        num_delayed: those of them that were not done when they were started.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._random = random.Random(order)
        self._waiting: dict[Lane, list[_Delayed[Any]]] = {"read": [], "early_read": [], "write": []}
        self.num_started = 0
        self.num_delayed = 0

    @property
    def num_waiting(self) -> int:
        """Works that have not been done yet."""
        return sum(map(len, self._waiting.values()))

    def start(self, lane: Lane, work: Callable[[], T]) -> Pending[T]:
        started = _Delayed(self, lane, work)
        self._waiting[lane].append(started)
        self.num_started += 1
        if self._order == "early":
            self.run_until(started)
        self._run_some()
        self.num_delayed += not started.is_done
        return started

    def join_all(self) -> None:
        for waiting in self._waiting.values():
            if waiting:
                self.run_until(waiting[-1])

    def run_until(self, started: _Delayed[Any]) -> None:
        """Do a work, and what its lane has before it."""
        waiting = self._waiting[started.lane]
        while not started.is_done:
            waiting.pop(0).run()

    def _run_some(self) -> None:
        if isinstance(self._order, int):
            lanes = list(self._waiting.values())
            for waiting in self._random.sample(lanes, len(lanes)):
                for _ in range(self._random.randint(0, len(waiting))):
                    waiting.pop(0).run()

    def joined(self, started: _Delayed[T]) -> None:
        """Somebody waits for a work."""
        self._run_some()
        self.run_until(started)


class _Delayed(Pending[T]):
    def __init__(self, streams: DelayedStreams, lane: Lane, work: Callable[[], T]) -> None:
        self._streams = streams
        self._work: Callable[[], T] | None = work
        self.lane = lane

    @property
    def is_done(self) -> bool:
        return self._work is None

    def run(self) -> None:
        assert self._work is not None, "work is done once"
        self._result = self._work()
        self._work = None

    def join(self) -> T:
        self._streams.joined(self)
        return self._result
