"""What a linker does beside loads and offloads: when weights change, and when it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from test_page_format import PAGE_TOKENS, fill, make_pool, slots_of

from hisparse.algorithms.quest import Quest
from hisparse.cache.exact_pages import ExactPages
from hisparse.config import HiSparseConfig
from hisparse.sglang import hooks
from hisparse.sglang.linker import HiSparseLinker
from hisparse.sglang.session import Session, start_session
from hisparse.sglang.storage.counters import StorageCounters

pytestmark = pytest.mark.filterwarnings("ignore")

KEYS = [f"{i:064x}" for i in range(4)]
PAGES = [1, 2, 3, 4]


class LoadedNowhere:
    """Stands for :class:`hisparse.engine.loaded.LoadedPages`."""

    def add(self, pages: torch.Tensor) -> int:
        return 0

    def drop(self, pages: torch.Tensor) -> None: ...


class Server:
    """A linker of the file store, and what it needs of a server."""

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 20, **options: Any
    ) -> None:
        self.pool = make_pool("page_head")
        fill(self.pool, seed=0)
        exact = ExactPages(60, 4, 4, lambda lens: lens > 0, torch.device("cpu"))
        self.exact = exact
        exact.set_exact(torch.arange(60))
        self.counters = StorageCounters()
        self.model = torch.nn.Linear(8, 8)
        session: Any = object.__new__(Session)
        session.__dict__.update(
            spec=SimpleNamespace(latent=False, num_layers=3),
            coordinator=SimpleNamespace(
                share_pages=lambda: (exact, LoadedNowhere()),
                stored_entries=dict,
                rebuilt_entries=dict,
                # Another test of this process may have switched the hooks on.
                on_pages_replaced=lambda slot: None,
                on_request_begin=lambda slot: None,
                on_request_end=lambda slot: None,
            ),
            algorithm=Quest(),
            config=HiSparseConfig(),
            storage=self.counters,
            model=self.model,
            model_settings={},
            report_metrics=lambda: None,
        )
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

    def update_weights(self, *, flush: bool) -> None:
        """SGLang's update from a disk, after the weights were read."""
        with torch.no_grad():
            self.model.weight += 1

        def original(updater: Any, recv_req: Any, success: bool, message: str) -> tuple[bool, str]:
            if recv_req.flush_cache:
                self.linker.reset()
            return success, message

        request = SimpleNamespace(flush_cache=flush)
        hooks.around_flush_cache_after_weight_update(original, None, request, True, "")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(tmp_path, monkeypatch)


def test_an_update_that_flushes_changes_to_pages_of_the_new_weights(server: Server) -> None:
    assert server.offload()
    assert server.num_found() == 4
    server.update_weights(flush=True)
    assert server.num_found() == 0
    assert server.offload()
    assert server.num_found() == 4
    assert server.counters.totals()["storage_offloaded_pages"] == 8


def test_an_update_without_a_flush_stops_the_store_until_one(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.update_weights(flush=False)
    server.update_weights(flush=False)
    assert len([x for x in caplog.messages if "/flush_cache" in x]) == 1
    assert server.offload(), "nothing is left to try again"
    assert server.num_found() == 0
    assert not server.linker.load("request", server.transfers())
    server.linker.reset()
    assert server.num_found() == 0, "K and V from before the flush are in the store"
    assert server.offload()
    assert server.num_found() == 4
    assert server.linker.load("request", server.transfers())


def test_an_update_past_the_loaders_counts_too(server: Server) -> None:
    """Weights that another process wrote into the memory (RDMA): SGLang never flushes then."""
    assert server.offload()
    for loaded, found in ((True, 4), (False, 0)):
        updater = SimpleNamespace(_session=SimpleNamespace(loaded_weights=loaded))
        hooks.around_end_weight_update(lambda updater, recv_req: None, updater, None)
        assert server.num_found() == found


def test_a_store_that_does_not_close_does_not_keep_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch, timeout_s=0.2)
    go, done = threading.Event(), threading.Event()

    def close() -> None:
        go.wait(60)
        done.set()

    monkeypatch.setattr(server.linker._storage, "close", close)
    server.linker.close()
    assert not done.is_set()
    go.set()
    assert done.wait(20)
