"""What a linker does beside loads and offloads: when weights change, and when it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import create_context, use_context
from sglang.srt.server_args import ServerArgs
from test_serializer import PAGE_TOKENS, fill, make_pool, slots_of
from torch import Tensor
from transformers import LlamaConfig
from weight_updates import CheckpointEngine, Updates

from hisparse.algorithms.quest import Quest
from hisparse.cache.shareable_pages import ShareablePages
from hisparse.config import HiSparseConfig
from hisparse.sglang import features, plugin
from hisparse.sglang.features.storage.calls import StorageCounters
from hisparse.sglang.features.storage.key import StorageState
from hisparse.sglang.features.storage.linker import HiSparseLinker
from hisparse.sglang.ranks import LinkerRanks
from hisparse.sglang.session import ServerSession, start_session

pytestmark = pytest.mark.filterwarnings("ignore")

KEYS = [f"{i:064x}" for i in range(4)]
PAGES = [1, 2, 3, 4]


class LoadedNowhere:
    """Stands for :class:`hisparse.engine.received.RestoredPages`."""

    def add(self, pages: torch.Tensor) -> int:
        return 0

    def drop(self, pages: torch.Tensor) -> None: ...


class Model(torch.nn.Module):
    """Loads weights as SGLang's models do, one tensor after the other.

    Attributes:
        failures: how many loads from now on fail after their first tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.failures = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            default_weight_loader(parameters[name], weight)
            if self.failures:
                self.failures -= 1
                raise RuntimeError("no more tensors came")


class Server:
    """A linker of the file store, and what it needs of a server."""

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 20, **options: Any
    ) -> None:
        self.pool = make_pool("page_head")
        fill(self.pool, seed=0)
        exact = ShareablePages(60, 4, 4, lambda lens: lens > 0, torch.device("cpu"))
        self.exact = exact
        exact.set_exact(torch.arange(60))
        self.counters = StorageCounters()
        self.model = Model()
        session: Any = object.__new__(ServerSession)
        session.__dict__.update(
            setup=SimpleNamespace(
                spec=SimpleNamespace(attention="GQA", num_layers=3),
                algorithm=Quest(),
                resolved=SimpleNamespace(config=HiSparseConfig()),
                policy=SimpleNamespace(layer_rules=()),
            ),
            backend=SimpleNamespace(
                metrics=SimpleNamespace(report=lambda now: None),
                coordinator=SimpleNamespace(
                    share_pages=lambda: (exact, LoadedNowhere()),
                    stored_entries=dict,
                    rebuilt_entries=dict,
                    # Another test of this process may have switched the hooks on.
                    on_pages_replaced=lambda slot: None,
                    on_request_begin=lambda slot: None,
                    on_request_end=lambda slot: None,
                ),
            ),
            _states={},
        )
        self.state = StorageState(
            model=self.model,
            model_settings={},
            model_config=LlamaConfig(),
            counters=self.counters,
        )
        session.add(self.state)
        monkeypatch.setenv(features.IN_USE, "server storage")
        monkeypatch.setattr("hisparse.sglang.session._session", None)
        start_session(session)
        kvcache = SimpleNamespace(host=self.pool)
        allocator = SimpleNamespace(get_kvcache=lambda: kvcache)
        params = SimpleNamespace(
            token_to_kv_pool_allocator=allocator, page_size=PAGE_TOKENS,
            attn_tp_cache_group=None, tp_cache_group=None,
        )  # fmt: skip
        extra = {"path": str(path), "timeout_s": timeout_s} | options
        self.linker = HiSparseLinker(None, params, components=None, extra_config=extra)

    def transfers(self) -> list[Any]:
        return [SimpleNamespace(name=PoolName.KV, keys=KEYS, device_indices=slots_of(PAGES))]

    def offload(self) -> bool:
        self.linker.offload(self.transfers())
        self.linker._writers[0].drain(20)
        assert self.linker.num_completed_offloads() == 1
        return self.linker.pop_completed_offload()

    def num_found(self) -> int:
        return sum(self.linker.lookup("request", self.transfers()))


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of only this process, and the hooks as a server installs them."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(features.IN_USE, "server storage")
        plugin.install_hooks()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path / "store", monkeypatch)


@pytest.fixture
def updates(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Updates]:
    engine = SimpleNamespace(SGLangCheckpointEngineWorkerExtensionImpl=CheckpointEngine)
    name = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
    monkeypatch.setitem(sys.modules, name, engine)
    args = ServerArgs(model_path="none", device="cpu")
    group = SimpleNamespace(cpu_group=None)
    with (
        use_context(create_context(args, role="scheduler")) as context,
        context.parallel.override(tp_group=group, tp_rank=0, pp_rank=0, dp_rank=None),
    ):
        yield Updates(server, tmp_path)


def test_an_update_that_flushes_changes_to_pages_of_the_new_weights(
    server: Server, updates: Updates
) -> None:
    assert server.offload()
    assert server.num_found() == 4
    assert updates.from_disk(flush=True).success
    assert server.num_found() == 0
    assert server.offload()
    assert server.num_found() == 4
    assert server.counters.totals()["storage_offloaded_pages"] == 8


def test_an_update_without_a_flush_stops_the_store_until_one(
    server: Server, updates: Updates, caplog: pytest.LogCaptureFixture
) -> None:
    updates.idle = False
    for flush in (False, True):
        assert updates.from_disk(flush=flush).success is not flush, "SGLang refuses the flush"
    assert len([x for x in caplog.messages if "hisparse" in x and "/flush_cache" in x]) == 1
    assert server.offload(), "nothing is left to try again"
    assert server.num_found() == 0
    assert not server.linker.load("request", server.transfers())
    updates.idle = True
    assert updates.flush()
    assert server.num_found() == 0, "K and V from before the flush are in the store"
    assert server.offload()
    assert server.num_found() == 4
    assert server.linker.load("request", server.transfers())


@pytest.mark.parametrize("way", ["disk", "ipc", "distributed", "tensor"])
def test_an_update_that_fails_midway_stops_the_store_until_a_flush(
    way: str, server: Server, updates: Updates
) -> None:
    """SGLang serves on, with weights of which some are new, and does not flush."""
    assert server.offload()
    old, update = updates.new_weights(), getattr(updates, f"from_{way}")
    opened = way in ("distributed", "tensor")
    if opened:
        updates.begin()
    server.model.failures = 1
    try:
        assert not update(flush=True).success
    except RuntimeError:
        assert way == "tensor", "the scheduler ends with an error that is not caught"
    assert not torch.equal(updates.new_weights()["first.weight"], old["first.weight"])
    assert server.num_found() == 0
    assert server.offload(), "nothing is left to try again"
    assert server.counters.totals()["storage_offloaded_pages"] == 4
    if opened:
        updates.end()
        assert server.num_found() == 0
    assert updates.flush()
    assert server.num_found() == 0, "the weights of which the store has pages are no more"
    assert server.offload()
    assert server.num_found() == 4


def test_a_bucket_that_fails_after_one_that_did_not(server: Server, updates: Updates) -> None:
    assert server.offload()
    updates.begin()
    assert updates.from_tensor(flush=True).success
    assert server.num_found() == 0
    server.offload()
    server.model.failures = 1
    with pytest.raises(RuntimeError, match="no more tensors"):
        updates.from_tensor(flush=True)
    assert (server.num_found(), server.offload()) == (0, True)
    assert server.counters.totals()["storage_offloaded_pages"] == 4


def test_weights_that_another_process_writes_into_memory(server: Server, updates: Updates) -> None:
    """RDMA: no loader sees them, and SGLang never flushes."""
    assert server.offload()
    updates.begin()
    with torch.no_grad():
        server.model.second.weight += 1
    assert updates.flush(), "others are written later, or at this moment"
    assert (server.num_found(), server.offload()) == (0, True)
    updates.end()
    assert (server.num_found(), server.offload()) == (0, True)
    assert server.counters.totals()["storage_offloaded_pages"] == 4
    assert updates.flush()
    assert server.num_found() == 0
    assert server.offload()
    assert server.num_found() == 4


def test_an_update_between_a_flush_and_the_next_request(server: Server, updates: Updates) -> None:
    assert updates.flush()
    assert updates.from_disk(flush=False).success
    assert server.offload()
    assert (server.num_found(), server.counters.totals()["storage_offloaded_pages"]) == (0, 0)


def test_the_check_of_an_update_writes_random_weights(server: Server, updates: Updates) -> None:
    """``/weights_checker``, for those who test their updates."""
    assert server.offload()
    fields: dict[str, Any] = {"allow_quant_error": False, "skip_tensor_list": None}
    request = SimpleNamespace(action="reset_tensors", selector="all", **fields)
    with torch.no_grad():
        assert updates.manager.check_weights(request).success
    assert server.num_found() == 0


@dataclass(frozen=True, kw_only=True)
class Thread(LinkerRanks):
    """One of two ranks, each of which is a thread."""

    texts: list[str]
    barrier: threading.Barrier

    def gather(self, text: str) -> list[str]:
        self.texts[self.rank] = text
        self.barrier.wait()
        gathered = list(self.texts)
        self.barrier.wait()
        return gathered

    def all_of(self, mine: bool) -> bool:
        return all(self.gather("true" if mine else ""))


def test_an_update_that_fails_on_one_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang flushes the other one: neither uses the store, or waits, until a flush of both."""
    servers = [Server(tmp_path / str(rank), monkeypatch) for rank in range(2)]
    ranks: Any = {"size": 2, "group": None, "texts": ["", ""]}
    ranks["barrier"] = threading.Barrier(2, timeout=20)
    for rank, server in enumerate(servers):
        server.linker.ranks = Thread(rank=rank, key=(rank, 2), **ranks)
        server.state.note_update(SimpleNamespace(_session=None))
    with ThreadPoolExecutor(2) as threads:
        servers[0].linker.reset()
        assert list(threads.map(Server.num_found, servers)) == [0, 0]
        assert list(threads.map(Server.offload, servers)) == [True, True]
        servers[1].linker.reset()
        assert list(threads.map(Server.num_found, servers)) == [0, 0]
        assert list(threads.map(Server.offload, servers)) == [True, True]
        assert list(threads.map(Server.num_found, servers)) == [4, 4]


def test_a_store_that_does_not_close_does_not_keep_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch, timeout_s=0.2)
    go, done = threading.Event(), threading.Event()

    def close() -> None:
        go.wait(60)
        done.set()

    monkeypatch.setattr(server.linker.records.storage, "close", close)
    server.linker.close()
    assert not done.is_set()
    go.set()
    assert done.wait(20)
