"""Work beside the forward stream: forked from it and joined to it by events.

What side work reads was there when it was started, and what it writes is nobody's else until it is
joined. The same calls serve every machine: without a side stream the work is done at once. A CUDA
graph that is being captured takes forks and joins in, if all that was forked is joined before its
end. On streams of CUDA not yet run on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import torch

__all__ = [
    "CudaStreams",
    "InlineStreams",
    "Lane",
    "Pending",
    "Ready",
    "SideStreams",
    "make_streams",
]

#: Work of one lane is done in the order in which it was started: "read" is from host memory to the
#: device, "write" from the device to host memory; a link carries both at once. "ahead" is what is
#: read for a later layer or step: what the current layer waits for does not queue behind it.
Lane = Literal["read", "ahead", "write"]

T = TypeVar("T")


class Pending(ABC, Generic[T]):
    """Work that was started."""

    @abstractmethod
    def join(self) -> T:
        """What the work returned. What the forward stream does from here on comes after it."""


class Ready(Pending[T]):
    """Work that is done."""

    def __init__(self, result: T) -> None:
        self._result = result

    def join(self) -> T:
        return self._result


class SideStreams(ABC):
    """One side stream for each lane."""

    @abstractmethod
    def start(self, lane: Lane, work: Callable[[], T]) -> Pending[T]:
        """Let ``work`` come after all that the forward stream has been given so far, and after what
        was started on the same lane, but not before what the forward stream is given next.

        Tensors that it uses or makes are held until it is joined.
        """

    @abstractmethod
    def join_all(self) -> None:
        """Join whatever has not been joined."""


class InlineStreams(SideStreams):
    """No side streams: work is done when it is started."""

    def start(self, lane: Lane, work: Callable[[], T]) -> Pending[T]:
        return Ready(work())

    def join_all(self) -> None:
        pass


class CudaStreams(SideStreams):
    """Streams of a CUDA device.

    Memory needs no marks for the allocator. What the forward stream made is held until the work is
    joined. What side work made goes back to its own stream, where the next user starts by waiting
    for the forward stream.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._lanes: dict[Lane, torch.cuda.Stream] = {
            "read": torch.cuda.Stream(device),
            "ahead": torch.cuda.Stream(device),
            "write": torch.cuda.Stream(device),
        }
        self._open: list[_OnStream[Any]] = []

    def start(self, lane: Lane, work: Callable[[], T]) -> Pending[T]:
        side = self._lanes[lane]
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            result = work()
        started = _OnStream(side, work, result, self._open)
        self._open.append(started)
        return started

    def join_all(self) -> None:
        for started in tuple(self._open):
            started.join()


class _OnStream(Pending[T]):
    def __init__(
        self,
        side: torch.cuda.Stream,
        work: Callable[[], T],
        result: T,
        still_open: list[_OnStream[Any]],
    ) -> None:
        self._side = side
        self._work: Callable[[], T] | None = work
        self._result = result
        self._event = side.record_event()
        self._open = still_open

    def join(self) -> T:
        if self._work is not None:
            torch.cuda.current_stream(self._side.device).wait_event(self._event)
            self._open.remove(self)
            self._work = None
        return self._result


def make_streams(device: torch.device) -> SideStreams:
    """Side streams if the device has streams."""
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()
