"""Runs work on a side stream, which forks from the forward stream and joins it by events.

Side work reads only data that exists when the work starts. No other work uses its results before it
is joined. A machine without side streams runs the work at once, through the same calls. A CUDA
graph can capture forks and joins if every fork is joined before the capture ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Pending(Generic[T]):
    """Work that has been started.

    Args:
        result: of the work.
        wait: lets the forward stream wait for the work; None: it has ended.
    """

    def __init__(self, result: T, wait: Callable[[], None] | None = None) -> None:
        self._result, self._wait = result, wait

    def join(self) -> T:
        """Order later work of the forward stream after this work; returns the work's result."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return self._result

    def forget(self) -> None:
        """Let go of what the work used: it is joined."""
        self._wait = None


class SideStream:
    """Runs work in the order of the starts. This class has no stream: :meth:`start` runs it."""

    def start(self, work: Callable[[], T]) -> Pending[T]:
        """Start ``work``; later work of the forward stream does not wait for it.

        The work runs after everything that the forward stream and this one were given so far. The
        tensors that the work uses or allocates are kept alive until it is joined.
        """
        return Pending(work())

    def join_all(self) -> None:
        """Join all work that has not been joined."""


class CudaStream(SideStream):
    """A stream of a CUDA device.

    Tensors need no ``record_stream``. Those that the forward stream allocated are kept alive until
    the work is joined. Those that side work allocated return to the side stream, and the next work
    there first waits for the forward stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._open: list[Pending[Any]] = []

    def start(self, work: Callable[[], T]) -> Pending[T]:
        side = self._side
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            result = work()
        event = side.record_event()

        def wait(_: object = work) -> None:  # Its default keeps the tensors of the work.
            torch.cuda.current_stream(side.device).wait_event(event)
            joined = self._open.index(started) + 1
            for earlier in self._open[:joined]:  # They came before it on the same stream.
                earlier.forget()
            del self._open[:joined]

        started = Pending(result, wait)
        self._open.append(started)
        return started

    def join_all(self) -> None:
        for started in tuple(self._open):
            started.join()


def make_stream(device: torch.device) -> SideStream:
    """A CUDA stream on a CUDA device, otherwise inline execution."""
    return CudaStream(device) if device.type == "cuda" else SideStream()
