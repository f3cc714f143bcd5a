"""A store that fails, hangs, cuts or flips: requests get whole pages or none, and in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backend import ByIndex, FakeBackend
from test_serializer import bits_at, fill, make_pool, slots_of

from hisparse.cache.serializer import PageSerializer
from hisparse.cache.shareable_pages import ShareablePages
from hisparse.sglang.features.storage import calls
from hisparse.sglang.features.storage.calls import StorageCounters, StorageHealth, Workers
from hisparse.sglang.features.storage.pages import (
    CHECKSUM_BYTES,
    BackendPages,
    FilePages,
    RecordBuffer,
)
from hisparse.sglang.features.storage.records import RecordStore
from hisparse.sglang.features.storage.writer import PageWriter
from hisparse.storage import FileStore, Namespace
from tests.processes import wait_until
from tests.sizes import sized

pytestmark = pytest.mark.filterwarnings("ignore")

TIMEOUT_S = 0.5
KEYS = [f"{i:064x}" for i in range(6)]
PAGES, OTHERS = [1, 2, 3, 4, 5, 6], [7, 9, 8, 11, 10, 12]
READY = ()


@dataclass
class World:
    """A pool with a store below it, and what a linker drives."""

    backend: Any
    counters: StorageCounters = field(default_factory=StorageCounters)
    open: Callable[[Any, RecordBuffer], Any] = BackendPages

    def __post_init__(self) -> None:
        self.pool = make_pool("page_head")
        fill(self.pool, seed=0)
        serializer = PageSerializer(self.pool, 8, {})
        self.serializer, row_bytes = serializer, serializer.record_bytes + CHECKSUM_BYTES
        self.storage = self.open(self.backend, RecordBuffer(4, 2, row_bytes))
        self.exact = ShareablePages(60, 4, 4, lambda lens: lens > 0, torch.device("cpu"))
        health = StorageHealth(self.counters, TIMEOUT_S)
        self.records = RecordStore(
            storage=self.storage,
            serializer=serializer,
            health=health,
            counters=self.counters,
            threads=2,
        )
        self.use("some model")
        self.writer = PageWriter(self.records, self.exact, 30)

    def use(self, model: str) -> None:
        self.records.namespace = self.namespace(model)

    def namespace(self, model: str) -> Namespace:
        sizes: dict[str, Any] = {"page_size": 8, "page_bytes": self.serializer.record_bytes}
        rank: dict[str, Any] = {"rank": 0, "num_ranks": 1}
        return Namespace(model=model, kv_dtype=self.serializer.describe(), **sizes, **rank)

    def pages(self, server_pages: list[int]) -> torch.Tensor:
        return self.serializer.host_pages(slots_of(server_pages))

    def offload(self, keys: list[str], server_pages: list[int]) -> bool:
        self.writer.add(keys, self.pages(server_pages), READY)
        self.writer.drain(20)
        assert self.writer.num_done() == 1
        return self.writer.pop()

    def store_all(self) -> None:
        self.exact.set_exact(self.pages(PAGES))
        assert self.offload(KEYS, PAGES)

    def load(self) -> bool:
        return self.records.load(KEYS, self.pages(OTHERS), READY)

    def count(self, name: str) -> int:
        return self.counters.totals()[f"storage_{name}"]

    def same(self) -> bool:
        """Whether the loaded pages are those that were stored."""
        new, old = bits_at(self.pool, slots_of(OTHERS)), bits_at(self.pool, slots_of(PAGES))
        return all(torch.equal(a, b) for a, b in zip(new, old, strict=True))


@pytest.fixture(params=[FakeBackend, ByIndex], ids=["by tensor", "by index"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param())
    yield made
    made.backend.woken.set()
    made.writer.close()
    made.records.close()


def test_pages_come_back_bit_for_bit(world: World) -> None:
    world.store_all()
    assert world.records.find(KEYS) == 6
    assert world.load()
    assert world.same()
    sizes = (6, 6 * world.serializer.record_bytes)
    assert (world.count("offloaded_pages"), world.count("offloaded_bytes")) == sizes
    assert (world.count("loaded_pages"), world.count("loaded_bytes")) == sizes


def test_pages_of_another_model_are_not_found(world: World) -> None:
    world.store_all()
    world.use("another model")
    assert world.records.find(KEYS) == 0
    assert (world.count("found_pages"), world.count("absent_pages")) == (0, 6)


def test_only_exact_pages_are_stored_and_only_the_first_of_them(world: World) -> None:
    world.exact.set_exact(world.pages([1, 2, 4]))
    assert world.offload(KEYS, PAGES), "nothing is left to try again"
    assert len(world.backend.puts) == 2
    assert world.count("inexact_pages") == 4
    assert world.records.find(KEYS) == 2


def test_a_page_of_half_exact_parts_is_not_stored(world: World) -> None:
    world.exact.set_exact(world.pages([1])[:1])
    assert world.offload(KEYS, PAGES)
    assert world.backend.puts == []


def test_known_pages_are_not_written_again(world: World) -> None:
    world.store_all()
    assert world.offload(KEYS, PAGES)
    assert len(world.backend.puts) == 6
    assert world.count("known_pages") == 6


@pytest.mark.parametrize("fault", ["absent", "short", "flip", "other record", "raise"])
@pytest.mark.parametrize("hit", [0, 5])
def test_a_load_that_lacks_one_page_fails_as_a_whole(world: World, fault: str, hit: int) -> None:
    world.store_all()
    world.backend.fault, world.backend.hit = fault, hit
    assert not world.load()
    assert world.count("failed_loads") == 1
    assert world.count("loaded_pages") == 0
    reason = {"absent": "lost_pages", "raise": "errors"}.get(fault, "damaged_pages")
    assert world.count(reason) >= 1
    # What could not be read counts as absent for a while.
    world.backend.fault = ""
    if fault != "raise":
        assert world.records.find(KEYS) < 6


@pytest.mark.sweeps
def test_each_flipped_bit_is_found(world: World) -> None:
    world.store_all()
    world.backend.fault = "flip"
    rows = range(2)
    for _ in range(sized(30, 1000)):
        assert world.storage.get(world.records.keys(KEYS[:2]), rows) == [False, False]


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that failed once is not asked again."""
    monkeypatch.setattr(calls, "_PAUSE_S", 1000.0)
    monkeypatch.setattr(calls, "_MAX_PAUSE_S", 1000.0)


@pytest.mark.usefixtures("long_pauses")
def test_a_store_that_hangs_is_left_alone(world: World) -> None:
    """The first request waits for it, and the pause spares the next ones the wait."""
    world.store_all()
    world.backend.fault = "hang"
    began = time.monotonic()
    assert world.records.find(KEYS) == 0
    assert time.monotonic() - began >= TIMEOUT_S
    world.backend.fault = ""
    assert [world.records.find(KEYS) for _ in range(20)] == [0] * 20
    assert not world.load()
    assert world.count("late_calls") == 1


def test_a_store_that_hung_is_tried_again(world: World) -> None:
    world.store_all()
    world.backend.fault = "hang"
    assert world.records.find(KEYS) == 0
    world.backend.fault = ""
    world.backend.woken.set()
    wait_until(lambda: world.records.find(KEYS) == 6, "the store was not tried again")
    assert world.load() and world.same()


def test_a_late_load_never_reaches_pages_that_were_given_back(world: World) -> None:
    world.store_all()
    world.backend.fault = "hang"
    assert not world.load()
    before = bits_at(world.pool, slots_of(OTHERS))
    world.backend.woken.set()
    time.sleep(0.2)
    after = bits_at(world.pool, slots_of(OTHERS))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_offloads_end_in_order_whatever_the_store_does(world: World) -> None:
    world.exact.set_exact(world.pages(PAGES))
    world.backend.fault = "hang"
    for i in range(3):
        world.writer.add(KEYS[i : i + 1], world.pages(PAGES[i : i + 1]), READY)
    world.writer.drain(20)
    assert world.writer.num_done() == 3
    assert [world.writer.pop() for _ in range(3)] == [False] * 3
    assert world.count("failed_offloads") == 3
    assert world.count("late_calls") >= 1


def test_a_refused_page_can_be_tried_again(world: World) -> None:
    world.exact.set_exact(world.pages(PAGES))
    world.backend.fault = "refuse"
    assert not world.offload(KEYS, PAGES)
    world.backend.fault = ""
    assert world.offload(KEYS, PAGES)
    assert world.load() and world.same()


def test_too_many_waiting_pages_are_refused_at_once(world: World) -> None:
    world.exact.set_exact(world.pages(PAGES))
    world.backend.fault = "hang"
    for _ in range(4):
        world.writer.add(KEYS, world.pages(PAGES), READY)
    # 30 host pages may wait: two calls of 12, and not a third.
    assert [job.stored.result(0) for job in list(world.writer._jobs)[2:]] == [False, False]


def test_after_a_reset_nothing_of_the_pool_is_written(world: World) -> None:
    """A flush frees the pages: what their slots hold later must not go under the old keys."""
    world.exact.set_exact(world.pages(PAGES))
    world.backend.fault = "hang"
    for key, page in zip(KEYS, PAGES, strict=True):
        world.writer.add([key], world.pages([page]), READY)
    world.writer.reset()
    before = [x.clone() for x in bits_at(world.pool, slots_of(PAGES))]
    fill(world.pool, seed=9)
    assert world.writer.num_done() == 0
    world.backend.fault = ""
    world.backend.woken.set()
    time.sleep(0.5)
    for key, record in world.backend.records.items():
        index = next(i for i, known in enumerate(KEYS) if key.endswith(known))
        row = record[None, : world.serializer.record_bytes]
        world.serializer.write(world.pages([13]), row)
        stored = bits_at(world.pool, slots_of([13]))
        for got, old in zip(stored, before, strict=True):
            assert torch.equal(got, old[8 * index : 8 * index + 8])


@pytest.mark.parametrize("reset", [False, True])
def test_a_put_that_waits_keeps_the_model_of_its_pages(
    world: World, reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush after an update of the weights finds a put behind a slow call."""
    world.exact.set_exact(world.pages(PAGES))
    old = list(world.records.keys(KEYS[:2]))
    read, copied, go = world.serializer.read, threading.Event(), threading.Event()

    def read_and_stall(pages: torch.Tensor, out: torch.Tensor) -> None:
        read(pages, out)
        world.writer._calls.submit(lambda: go.wait(60))
        copied.set()

    monkeypatch.setattr(world.serializer, "read", read_and_stall)
    world.writer.add(KEYS[:2], world.pages(PAGES[:2]), READY)
    assert copied.wait(20)
    if reset:
        world.writer.reset()
    world.use("another model")
    go.set()
    world.writer._copies.submit(lambda: None).result(20)
    world.writer._calls.submit(lambda: None).result(20)
    assert world.backend.puts == ([] if reset else old)


@pytest.mark.usefixtures("long_pauses")
def test_waiting_offloads_end_with_the_one_that_hangs(world: World) -> None:
    """They lock pages of the radix cache: one waits for the store, not each."""
    world.exact.set_exact(world.pages(PAGES))
    world.backend.fault = "hang"
    for key, page in zip(KEYS, PAGES, strict=True):
        world.writer.add([key], world.pages([page]), READY)
    world.writer.drain(20)
    assert [world.writer.pop() for _ in KEYS] == [False] * 6
    assert world.count("late_calls") == 1


@pytest.mark.parametrize("hit", [0, 3])
def test_a_damaged_record_is_written_again(world: World, hit: int) -> None:
    """The request that could not load it computes its page, and offloads it."""
    world.store_all()
    world.backend.records[list(world.records.keys(KEYS))[hit]][0] ^= 1
    assert not world.load()
    assert world.records.find(KEYS) == hit
    assert world.offload(KEYS, PAGES)
    assert world.records.find(KEYS) == 6
    assert world.load() and world.same()
    assert world.offload(KEYS, PAGES)
    assert len(world.backend.puts) == 6 + 6 - hit, "what is whole again is not written again"


class _Counted(list[str]):
    """Names, which counts how many of them are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.num_read += 1
            yield name


def test_a_lookup_that_finds_few_pages_reads_few_names(tmp_path: Path) -> None:
    """The scheduler repeats it for each waiting request, and a prompt may have 62,500 pages."""
    world = World(FileStore(tmp_path), open=FilePages)
    world.store_all()
    for stored in ([], KEYS):
        names = _Counted([*stored, *(f"{i:064x}" for i in range(10, 62_500))])
        assert world.records.find(names) == len(stored)
        assert names.num_read < 20
    world.writer.close()
    world.records.close()
    world.storage.close()


@pytest.mark.parametrize(
    ("task", "counted"),
    [("raise", "storage_errors"), ("hang", "storage_late_calls")],
)
def test_a_time_limit_of_the_backends_own_is_an_error_of_its(
    task: str, counted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The line in the log must not blame timeout_s for it."""
    counters, workers = StorageCounters(), Workers(1, "test")

    def run() -> Any:
        if task == "raise":
            raise TimeoutError("no answer of 10.0.0.1")
        time.sleep(2)

    assert StorageHealth(counters, 20.0 if task == "raise" else 0.1).call(workers, run) is None
    totals = {name: total for name, total in counters.totals().items() if total}
    assert totals == {counted: 1}
    assert ("10.0.0.1" in caplog.text) == (task == "raise")
    workers.close()
