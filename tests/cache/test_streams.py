"""The order of side work: with stand-ins for CUDA streams."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from hisparse.cache.streams import CudaStream, SideStream, make_stream


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
def side(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    Stream.current = Stream()
    side = make_stream(torch.device("cuda"))
    assert isinstance(side, CudaStream)
    return side


def operate() -> Counter[Stream]:
    return Stream.current.operate()


def test_side_work_comes_after_its_start_and_before_its_join(side: SideStream) -> None:
    before = operate()
    first, second = side.start(operate), side.start(operate)
    beside = operate()
    one = first.join()
    after_one = operate()
    two = second.join()
    assert before < one < two, "work runs in the order of the starts"
    assert not beside > one, "nothing waits before the join"
    assert not one > beside, "the work does not wait for what came after its start"
    assert after_one > one
    assert not after_one > two
    assert operate() > two


def test_join_all_leaves_nothing_behind(side: SideStream) -> None:
    times: list[Counter[Stream]] = []
    for _ in range(3):
        side.start(lambda: times.append(operate()))
    side.join_all()
    end = operate()
    assert all(end > time for time in times)


def test_work_holds_what_it_uses_until_it_is_joined(side: SideStream) -> None:
    """Otherwise the allocator could reuse the memory: it tracks only the forward stream."""

    def start() -> tuple[weakref.ref[torch.Tensor], Callable[[], object]]:
        used = torch.zeros(3)
        started = side.start(lambda: len(used))
        return weakref.ref(used), started.join

    used, join = start()
    gc.collect()
    assert used() is not None
    join()
    gc.collect()
    assert used() is None


def test_a_join_lets_go_of_the_work_before_it(side: SideStream) -> None:
    """What a layer's loads use does not stay until the end of the step."""
    used = torch.zeros(3)
    first = side.start(partial(len, used))
    last, kept = side.start(operate), weakref.ref(used)
    del used
    last.join()
    gc.collect()
    assert kept() is None
    clock = Stream.current.record_event()
    assert first.join() == 3
    side.join_all()
    assert Stream.current.record_event() == clock


def test_a_second_join_waits_for_nothing(side: SideStream) -> None:
    """The event may belong to a graph that was captured in between."""
    started = side.start(lambda: "result")
    assert started.join() == "result"
    clock = Stream.current.record_event()
    side.start(operate)
    assert started.join() == "result"
    assert Stream.current.record_event() == clock


def test_without_cuda_work_is_done_at_once() -> None:
    side, done = make_stream(torch.device("cpu")), []
    assert not isinstance(side, CudaStream)
    started = side.start(lambda: done.append(1))
    assert done == [1]
    started.join()
    side.join_all()
    assert done == [1]
