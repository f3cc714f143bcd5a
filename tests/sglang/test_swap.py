"""Pages of a retracted request come back as they were, only to it, or are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from fake_backend import FakeBackend
from test_serializer import bits_at, fill, slots_of
from test_storage_faults import KEYS, OTHERS, PAGES, READY, TIMEOUT_S, World

from hisparse.sglang.features.storage import calls
from hisparse.sglang.features.storage.pages import Keys
from hisparse.sglang.features.storage.swap import RequestSwap
from hisparse.storage import Namespace
from tests.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")

#: Of the host pages of ``PAGES``, two for each: from the eighth on a sparse step led to them.
FLAGS = torch.arange(12) < 7


class Removing:
    """Removes single records of a backend, as the file store does of its own."""

    def __init__(self, backend: FakeBackend) -> None:
        self._records = backend.records

    def remove(self, namespace: Namespace, keys: Sequence[str] = (), unused_s: float = 0) -> None:
        for key in Keys(namespace, keys):
            self._records.pop(key, None)


@dataclass(eq=False)
class Request:
    rid: str = "r"


class SwapWorld(World):
    """A pool with a store below it, and a swap of retracted requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        records = self.records.within(self.namespace("retracted requests"))
        self.swap = RequestSwap(records, Removing(self.backend), self.exact)
        self.exact.write(self.pages(PAGES), FLAGS)
        self.exact.set_exact(self.pages(OTHERS))

    def out(self, request: Request, keys: Sequence[str] = KEYS) -> bool:
        return self.swap.swap_out(request, keys, self.pages(PAGES[: len(keys)]), READY)

    def back(self) -> bool:
        return self.swap.load("r", KEYS, self.pages(OTHERS), READY)

    def is_empty(self) -> bool:
        return not self.backend.records


@pytest.fixture
def world() -> Iterator[SwapWorld]:
    made = SwapWorld(FakeBackend())
    yield made
    made.backend.woken.set()
    made.swap.close()
    made.writer.close()
    made.records.close()


def test_pages_and_flags_come_back_and_leave_the_store(world: SwapWorld) -> None:
    request = Request()
    assert world.out(request)
    # The slots are others' now.
    kept = bits_at(world.pool, slots_of(PAGES))
    fill(world.pool, seed=1)
    assert world.swap.first("r", KEYS) == 0
    assert world.swap.find("r", KEYS) == 6
    assert world.back()
    for now, before in zip(bits_at(world.pool, slots_of(OTHERS)), kept, strict=True):
        assert torch.equal(now, before)
    assert torch.equal(world.exact.read(world.pages(OTHERS)), FLAGS)
    assert (world.count("swapped_pages"), world.count("swapped_in_pages")) == (6, 6)
    assert world.count("failed_swaps") == 0
    wait_until(world.is_empty)
    assert world.swap.first("r", KEYS) == 6


def test_nobody_else_finds_the_pages(world: SwapWorld) -> None:
    """Neither another request with the same tokens nor another server."""
    request = Request()
    assert world.out(request)
    assert world.records.find(KEYS) == 0
    assert world.swap.first("another", KEYS) == 6
    assert world.swap.find("another", KEYS) == 0
    assert not world.swap.load("another", KEYS, world.pages(OTHERS), READY)
    assert world.back(), "they are still there"


def test_a_request_finds_what_its_prefix_in_host_memory_leaves(world: SwapWorld) -> None:
    """Another one has evicted pages before them, or inserted some of the same tokens."""
    request = Request()
    assert world.out(request, KEYS[2:])
    assert world.swap.first("r", KEYS) == 2
    assert world.swap.find("r", KEYS[2:]) == 4
    assert world.swap.first("r", KEYS[4:]) == 0
    assert world.swap.find("r", [KEYS[4], KEYS[5], "f" * 64]) == 2
    # PAGES[2] is the page of KEYS[4] here.
    assert world.swap.load("r", KEYS[4:], world.pages(OTHERS[:2]), READY)
    assert torch.equal(world.exact.read(world.pages(OTHERS[:2])), FLAGS[4:8])
    new, old = bits_at(world.pool, slots_of(OTHERS[:2])), bits_at(world.pool, slots_of(PAGES[2:4]))
    assert all(torch.equal(a, b) for a, b in zip(new, old, strict=True))


@pytest.mark.parametrize("fault", ["refuse", "raise"])
def test_a_request_whose_pages_are_not_written_computes_them(world: SwapWorld, fault: str) -> None:
    request = Request()
    world.backend.fault = fault
    assert not world.out(request)
    assert world.count("failed_swaps") == 1
    assert world.swap.first("r", KEYS) == 6


@pytest.mark.parametrize("fault", ["absent", "short", "flip", "other record", "raise"])
@pytest.mark.parametrize("hit", [0, 5])
def test_a_request_whose_pages_do_not_come_back_computes_them(
    world: SwapWorld, fault: str, hit: int
) -> None:
    request = Request()
    assert world.out(request)
    world.backend.fault, world.backend.hit = fault, hit
    assert not world.back()
    assert (world.count("swapped_in_pages"), world.count("failed_swaps")) == (0, 1)
    assert world.swap.first("r", KEYS) == 6, "it is not tried again"
    world.backend.fault = ""
    wait_until(world.is_empty)


def test_a_store_that_hangs_delays_one_retraction(
    world: SwapWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_PAUSE_S", 1000.0)
    monkeypatch.setattr(calls, "_MAX_PAUSE_S", 1000.0)
    requests = [Request(str(i)) for i in range(20)]
    world.backend.fault = "hang"
    began = time.monotonic()
    assert [world.out(request) for request in requests] == [False] * 20
    assert time.monotonic() - began >= TIMEOUT_S
    assert (world.count("late_calls"), world.count("failed_swaps")) == (1, 20)
    # What was late, two blocks of two records, is written in the end, and removed after that.
    world.backend.woken.set()
    wait_until(lambda: len(world.backend.puts) == 4 and world.is_empty())


def test_a_request_that_is_retracted_again_has_its_new_pages_only(world: SwapWorld) -> None:
    request = Request()
    assert world.out(request, KEYS[:4])
    assert world.out(request)
    wait_until(lambda: len(world.backend.records) == 6)
    assert world.back()
    assert world.same()


def test_an_old_request_does_not_take_the_pages_of_a_new_one(world: SwapWorld) -> None:
    """Clients choose ids, and may choose one again."""
    old, new = Request(), Request()
    assert world.out(old)
    assert world.out(new)
    del old
    wait_until(lambda: len(world.backend.records) == 6)
    assert world.back()


@pytest.mark.parametrize("end", ["reset", "close"])
def test_nothing_is_left_behind(world: SwapWorld, end: str) -> None:
    requests = [Request(str(i)) for i in range(3)]
    assert all(world.out(request) for request in requests)
    getattr(world.swap, end)()
    wait_until(world.is_empty)
    assert world.swap.first("1", KEYS) == 6
