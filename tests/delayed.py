"""Side streams for tests that run work as early, as late or in as random an order as allowed.

A side stream runs work at any time between its start and its join. If a result depends on a
narrower order, it differs here from the result of inline execution.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from hisparse.cache.streams import Lane, Pending, SideStreams

T = TypeVar("T")

#: When work runs. "early": at its start. "late": at its join, or at the join of later work on its
#: lane. A seed: at random calls of :class:`DelayedStreams` in between.
Order = Literal["early", "late"] | int


class DelayedStreams(SideStreams):
    """Runs side work at another time than inline execution does.

    Args:
        order: when work runs.

    Attributes:
        num_started: started pieces of work.
        num_delayed: pieces of work that did not run at their start.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._random = random.Random(order)
        self._waiting: dict[Lane, list[_Delayed[Any]]] = {"read": [], "write": []}
        self.num_started = 0
        self.num_delayed = 0

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not run yet."""
        return sum(map(len, self._waiting.values()))

    def start(self, lane: Lane, work: Callable[[], T]) -> Pending[T]:
        started = _Delayed(self, lane, work)
        self._waiting[lane].append(started)
        self.num_started += 1
        if self._order == "early":
            self.run_until(started)
        self._run_random()
        self.num_delayed += not started.is_done
        return started

    def join_all(self) -> None:
        for waiting in self._waiting.values():
            if waiting:
                self.run_until(waiting[-1])

    def run_until(self, started: _Delayed[Any]) -> None:
        """Run the work of a lane up to ``started``."""
        waiting = self._waiting[started.lane]
        while not started.is_done:
            waiting.pop(0).run()

    def _run_random(self) -> None:
        if isinstance(self._order, int):
            lanes = list(self._waiting.values())
            for waiting in self._random.sample(lanes, len(lanes)):
                for _ in range(self._random.randint(0, len(waiting))):
                    waiting.pop(0).run()

    def joined(self, started: _Delayed[T]) -> None:
        """Run a piece of work, because it is joined."""
        self._run_random()
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
        assert self._work is not None, "work runs once"
        self._result = self._work()
        self._work = None

    def join(self) -> T:
        self._streams.joined(self)
        return self._result
