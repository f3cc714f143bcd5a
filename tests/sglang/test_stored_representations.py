"""Representations in a store: what comes back is what building gives; what is absent is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.algorithms.snapkv import SnapKV
from hisparse.cache.serializer import PageSerializer
from hisparse.cache.shareable_pages import ShareablePages
from hisparse.config import HiSparseConfig
from hisparse.engine.prefill import PrefillChunk
from hisparse.options import StorageOptions
from hisparse.sglang.features.storage import representations
from hisparse.sglang.features.storage.calls import StorageCounters, StorageHealth
from hisparse.sglang.features.storage.pages import FilePages, RecordBuffer
from hisparse.sglang.features.storage.records import RecordStore
from hisparse.sglang.features.storage.representations import (
    representation_namespace,
    representation_records,
)
from hisparse.sglang.features.storage.writer import PageWriter
from hisparse.storage import FileStore, Namespace
from hisparse.testing import Simulator
from tests.engine.test_restored_pages import LATENTS, LENGTH, PROMPT, STORED, load

pytestmark = pytest.mark.filterwarnings("ignore")

PER_RECORD = 2
PAGES = Namespace(model="model", kv_dtype="float32", page_size=8, rank=0, num_ranks=1, page_bytes=8)
STORABLE: dict[str, dict[str, Any]] = {
    "quest": {"algorithm": Quest()},
    "sketch": {"algorithm": Sketch()},
    "fp8": {"algorithm": Quest(), "kv_cache_dtype": "fp8_e4m3"},
    "tail estimate": {"algorithm": Sketch(), "extensions": {"tail_estimate": True}},
}


class Storing:
    """An engine with a store of representations."""

    def __init__(self, path: Path, sim: Simulator) -> None:
        self.sim = sim
        resolved = SimpleNamespace(config=HiSparseConfig())
        session = SimpleNamespace(
            coordinator=sim.coordinator, setup=SimpleNamespace(resolved=resolved)
        )
        entries, host = sim.coordinator.rebuilt_entries(), sim.manager.host
        tokens = PER_RECORD * sim.page_size
        self.serializer = serializer = PageSerializer(host, tokens, entries, with_kv=False)
        self.store, counters = FileStore(path), StorageCounters()
        self.records = RecordStore(
            storage=FilePages(self.store, RecordBuffer(2, 4, serializer.record_bytes + 100)),
            serializer=serializer,
            health=StorageHealth(counters, 20),
            counters=counters,
            threads=1,
            namespace=representation_namespace(PAGES, session, serializer.record_bytes),
        )
        num_pages = sim.manager.host.num_pages
        self.exact = ShareablePages(num_pages, 4, 4, lambda lens: lens > 0, torch.device("cpu"))
        self.exact.set_exact(torch.arange(num_pages))
        self.writer = PageWriter(self.records, self.exact, 1000)

    def offload(self, names: list[str], pages: Tensor) -> bool:
        self.writer.add(names, pages, ())
        self.writer.drain(30)
        return self.writer.pop()

    def load(self, names: list[str], pages: Tensor) -> list[int]:
        return self.records.load_found(names, pages, ()).tolist()

    def close(self) -> None:
        self.writer.close()
        self.records.close()
        self.store.close()


@pytest.fixture
def opened() -> Iterator[list[Storing]]:
    made: list[Storing] = []
    yield made
    for each in made:
        each.close()


def names_of(pages: Tensor) -> list[str]:
    return [f"{i:064x}" for i in range(len(pages) // PER_RECORD)]


@pytest.mark.parametrize("shape", STORABLE.values(), ids=STORABLE)
def test_steps_are_those_of_a_computed_prompt(
    shape: dict[str, Any], tmp_path: Path, opened: list[Storing]
) -> None:
    source, target = (Simulator(**shape) for _ in range(2))
    target.free_host_pages.reverse()
    computed, request = (
        sim.request(slot, LENGTH, 3, prompt=PROMPT) for sim, slot in ((source, 1), (target, 2))
    )
    source.prefill((computed, STORED))
    old, opened[:] = torch.tensor(computed.host_pages), [Storing(tmp_path, source)]
    assert opened[0].offload(names_of(old), old)
    loaded = load(source, computed, target, request)
    new = torch.tensor(request.host_pages)
    loaded.drop(new)
    opened.append(Storing(tmp_path, target))
    assert opened[1].load(names_of(new), new) == []
    pairs = [(source.prefill((computed, 40))[0], target.prefill((request, 40))[0])]
    pairs += [(source.decode(computed), target.decode(request)) for _ in range(30)]
    for got, expected in pairs:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", STORABLE.values(), ids=STORABLE)
def test_pages_of_decode_steps_have_what_building_gives(shape: dict[str, Any]) -> None:
    sim = Simulator(**shape)
    request = sim.request(1, LENGTH, 3, prompt=40)
    sim.prefill((request, 40))
    size = sim.page_size
    while request.done < 40 + 10 * size:
        sim.decode(request)
    count = request.done // size
    pages, coordinator = torch.tensor(request.host_pages[:count]), sim.coordinator
    entries = coordinator.rebuilt_entries()
    kept = {name: each[:, pages].clone() for name, each in entries.items()}
    for each in entries.values():
        each[:, pages] = 0
    slots = (pages[:, None] * size + torch.arange(size)).flatten()
    chunk = PrefillChunk(
        slot=1, start=0, length=count * size, offset=0, host_pages=pages.int(), is_last=False
    )
    for layer in range(sim.layers):
        coordinator.prefill.build_representations(
            layer, chunk, *sim.manager.kv_io.read_tokens(layer, slots)
        )
    assert kept
    for name, each in entries.items():
        # A mean of tokens that came one by one is rounded otherwise.
        torch.testing.assert_close(each[:, pages].float(), kept[name].float(), msg=name)


def test_what_the_store_lacks_is_built(tmp_path: Path, opened: list[Storing]) -> None:
    sim = Simulator(algorithm=Quest())
    opened.append(Storing(tmp_path, sim))
    pages = torch.arange(1, 13)
    names = names_of(pages)
    assert opened[0].load(names, pages) == pages.tolist()
    assert opened[0].offload(names[:4], pages[:8])
    assert opened[0].load(names, pages) == [9, 10, 11, 12]
    opened[0].store.close()
    assert opened[0].load(names, pages) == pages.tolist()


def test_inexact_pages_are_not_stored(tmp_path: Path, opened: list[Storing]) -> None:
    opened.append(Storing(tmp_path, Simulator(algorithm=Quest())))
    pages = torch.arange(1, 13)
    opened[0].exact._flags[7:] = False
    assert opened[0].offload(names_of(pages), pages)
    assert opened[0].load(names_of(pages), pages) == list(range(7, 13))


class Foreign(Quest):
    """An algorithm of somebody else; the version of Quest says nothing of what it computes."""


def test_only_the_same_algorithm_and_options_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(sim: Simulator, **settings: Any) -> str:
        config = HiSparseConfig.from_dict(settings)
        resolved = SimpleNamespace(config=config)
        session = SimpleNamespace(
            coordinator=sim.coordinator, setup=SimpleNamespace(resolved=resolved)
        )
        return representation_namespace(PAGES, session, 64).key

    first = key(Simulator(algorithm=Sketch()))
    assert key(Simulator(algorithm=Sketch()), budget=4096) == first
    others = [key(Simulator(**shape)) for shape in STORABLE.values()]
    assert others.index(first) == 1 and others.count(first) == 1
    assert key(Simulator(algorithm=Sketch(economy=True))) != first
    on_gpu = Simulator(algorithm=Sketch())
    on_gpu.coordinator.policy = replace(on_gpu.coordinator.policy, device="cuda")
    assert key(on_gpu) != first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sketch, "store_version", 2)
        assert key(Simulator(algorithm=Sketch())) != first
    # As it was while sketches, also those of other algorithms, had their bytes in another order.
    monkeypatch.setattr(representations, "_FORMAT_VERSION", 3)
    assert key(Simulator(algorithm=Sketch())) != first


def test_without_a_version_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    sim, tokens = Simulator(algorithm=Foreign()), PER_RECORD * 8
    setup = SimpleNamespace(resolved=SimpleNamespace(config=HiSparseConfig()))
    session = SimpleNamespace(coordinator=sim.coordinator, setup=setup)
    pages: Any = SimpleNamespace(serializer=PageSerializer(sim.manager.host, tokens, {}))
    with caplog.at_level("INFO", "hisparse"):
        assert representation_records(session, StorageOptions(path="store"), pages) is None
    assert "Foreign declares no store_version" in caplog.text


class SeesTheQuery(Quest):
    query_window = 8


@pytest.mark.parametrize(
    "shape",
    [
        {"algorithm": SnapKV()},
        {"algorithm": DIPR(index="flat")},
        {"algorithm": DSA(), **LATENTS},
        {"algorithm": SeesTheQuery()},
    ],
    ids=["snapkv", "dipr", "dsa", "a-query-window"],
)
def test_state_of_requests_is_built(shape: dict[str, BaseSparseAlgorithm]) -> None:
    assert Simulator(**shape).coordinator.rebuilt_entries() == {}
