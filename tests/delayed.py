"""A side stream for tests that runs work as early, as late or in as random an order as allowed.

A side stream runs work at any time between its start and its join. If a result depends on a
narrower order, it differs here from the result of inline execution.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from hisparse.cache.streams import Pending, SideStream

T = TypeVar("T")

#: When work runs. "early": at its start. "late": at its join, or at the join of later work.
#: A seed: at random calls of :class:`DelayedStream` in between.
Order = Literal["early", "late"] | int


class DelayedStream(SideStream):
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
        self._waiting: list[_Delayed[Any]] = []
        self.num_started = 0
        self.num_delayed = 0

    def start(self, work: Callable[[], T]) -> Pending[T]:
        started = _Delayed(self, work)
        self._waiting.append(started)
        self.num_started += 1
        if self._order == "early":
            self.join_all()
        self._run_random()
        self.num_delayed += not started.is_done
        return started

    def join_all(self) -> None:
        while self._waiting:
            self._waiting.pop(0).run()

    def _run_random(self) -> None:
        if isinstance(self._order, int):
            for _ in range(self._random.randint(0, len(self._waiting))):
                self._waiting.pop(0).run()

    def joined(self, started: _Delayed[T]) -> None:
        """Run a piece of work, because it is joined."""
        self._run_random()
        while not started.is_done:
            self._waiting.pop(0).run()


class _Delayed(Pending[T]):
    def __init__(self, stream: DelayedStream, work: Callable[[], T]) -> None:
        self._stream = stream
        self._work: Callable[[], T] | None = work

    @property
    def is_done(self) -> bool:
        return self._work is None

    def run(self) -> None:
        assert self._work is not None, "work runs once"
        self._result = self._work()
        self._work = None

    def join(self) -> T:
        self._stream.joined(self)
        return self._result
