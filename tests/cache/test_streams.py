"""The order of side streams: with stand-ins for CUDA streams."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from hisparse.cache.streams import CudaStreams, SideStreams, make_streams


class Stream:
    """A vector clock instead of a queue: the operations before the stream's next one."""

    current: Stream

    def __init__(self, device: object = None) -> None:
        self.device = device
        self.clock: Counter[Stream] = Counter()

    def operate(self) -> Counter[Stream]:
        """Run an operation; returns its time."""
        self.clock[self] += 1
        return self.clock.copy()

    def record_event(self) -> Counter[Stream]:
        return self.clock.copy()

    def wait_event(self, event: Counter[Stream]) -> None:
        self.clock |= event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@contextmanager
def use(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SideStreams:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    Stream.current = Stream()
    streams = make_streams(torch.device("cuda"))
    assert isinstance(streams, CudaStreams)
    return streams


def operate() -> Counter[Stream]:
    return Stream.current.operate()


def test_side_work_comes_after_its_start_and_before_its_join(streams: SideStreams) -> None:
    before = operate()
    read, write = streams.start("read", operate), streams.start("write", operate)
    beside = operate()
    reading = read.join()
    after_read = operate()
    writing = write.join()
    assert before < reading
    assert before < writing
    assert not beside > reading, "nothing waits before the join"
    assert not reading > beside, "the work does not wait for what came after its start"
    assert after_read > reading
    assert not after_read > writing
    assert operate() > writing


def test_work_of_one_lane_is_in_order_and_of_two_lanes_is_not(streams: SideStreams) -> None:
    first, write, second = (streams.start(x, operate) for x in ("read", "write", "read"))
    times = [started.join() for started in (second, first, write)]
    assert times[0] > times[1]
    assert not times[0] > times[2]
    assert not times[2] > times[0]


def test_join_all_leaves_nothing_behind(streams: SideStreams) -> None:
    times: list[Counter[Stream]] = []
    for lane in ("read", "write", "read"):
        streams.start(lane, lambda: times.append(operate()))
    streams.join_all()
    end = operate()
    assert all(end > time for time in times)


def test_work_holds_what_it_uses_until_it_is_joined(streams: SideStreams) -> None:
    """Otherwise the allocator could reuse the memory: it tracks only the forward stream."""

    def start() -> tuple[weakref.ref[torch.Tensor], Callable[[], object]]:
        used = torch.zeros(3)
        started = streams.start("write", lambda: len(used))
        return weakref.ref(used), started.join

    used, join = start()
    gc.collect()
    assert used() is not None
    join()
    gc.collect()
    assert used() is None


def test_a_second_join_waits_for_nothing(streams: SideStreams) -> None:
    """The event may belong to a graph that was captured in between."""
    started = streams.start("read", lambda: "result")
    assert started.join() == "result"
    clock = Stream.current.record_event()
    streams.start("read", operate)
    assert started.join() == "result"
    assert Stream.current.record_event() == clock


def test_without_cuda_work_is_done_at_once() -> None:
    streams, done = make_streams(torch.device("cpu")), []
    assert not isinstance(streams, CudaStreams)
    started = streams.start("read", lambda: done.append(1))
    assert done == [1]
    started.join()
    streams.join_all()
    assert done == [1]
