"""A swap with SGLang's own requests, slots and radix cache, without a model."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req, release_req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import create_context, use_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from test_serializer import NUM_PAGES, PAGE_TOKENS, bits_at, fill
from test_storage_weights import Server

from hisparse.sglang.features.storage.swap import around_release_req
from hisparse.sglang.session import require_session
from tests.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")


class Scheduler:
    """The memory of a scheduler, with a linker of the file store."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = Server(path, monkeypatch, swap_min_tokens=0)
        self.rows = ReqToTokenPool(
            size=4, max_context_len=64, device="cpu", enable_memory_saver=False
        )
        # Host pages of four tokens, two for a page of SGLang, one of which is padding.
        self.slots = PagedTokenToKVPoolAllocator(
            size=(NUM_PAGES // 2 - 1) * PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.float32,
            device="cpu",
            kvcache=SimpleNamespace(host=self.server.pool),
            need_sort=False,
        )
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.slots,
                page_size=PAGE_TOKENS,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.cache.init_cache_linker(self.server.linker)
        require_session().req_to_token_pool = self.rows

    def run(self, rid: str) -> tuple[Req, torch.Tensor]:
        """A request after a prompt of 20 tokens and 13 steps, and its host slots."""
        request = Req(rid, "", array("q", range(20)), SamplingParams(max_new_tokens=50))
        request.init_next_round_input(self.cache)
        self.rows.alloc([request])
        slots = self.slots.alloc(5 * PAGE_TOKENS)
        self.rows.write((request.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        request.kv.kv_allocated_len = request.kv.kv_committed_len = request.extend_end = 20
        checkpoint_kv_cache(request, self.cache)
        request.output_ids.extend(range(100, 113))
        request.kv.kv_allocated_len = request.kv.kv_committed_len = 32
        return request, slots

    def retract(self, request: Req) -> None:
        """As the scheduler does; then what was freed gets other contents."""
        assert around_release_req(
            release_req,
            req=request,
            remaing_req_count=0,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            tree_cache=self.cache,
            hisparse_coordinator=None,
        )

    def load(self, request: Req) -> torch.Tensor:
        """Host slots of what is loaded for a request that is admitted."""
        request.init_next_round_input(self.cache)
        params: Any = {"best_match_node": request.best_match_node, "req": request}
        found = request.host_hit_length
        loaded, _ = self.cache.init_load_back(InitLoadBackParams(host_hit_length=found, **params))
        assert loaded == found
        return self.cache.linker.private_load_indices[request.rid]

    def store_prompt(self) -> None:
        """Wait until the store has what entered the radix cache."""
        self.server.linker._writers[0].drain(20)
        self.cache.check_hicache_events()


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    args = ServerArgs(model_path="none", device="cpu", page_size=PAGE_TOKENS)
    with use_context(create_context(args, role="scheduler")):
        yield Scheduler(tmp_path, monkeypatch)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_request_comes_back_to_its_prompt(scheduler: Scheduler) -> None:
    request, slots = scheduler.run("r")
    answer = bits_at(scheduler.server.pool, slots[16:32])
    scheduler.retract(request)
    fill(scheduler.server.pool, seed=1)
    loaded = scheduler.load(request)
    assert request.prefix_len == 16, "of the prompt, in the radix cache"
    assert same(bits_at(scheduler.server.pool, loaded), answer)


def test_a_request_comes_back_without_its_prompt(scheduler: Scheduler) -> None:
    """Others have evicted the prompt, which the store has for all."""
    request, slots = scheduler.run("r")
    before = bits_at(scheduler.server.pool, slots[:32])
    scheduler.store_prompt()
    scheduler.retract(request)
    scheduler.cache.evict(EvictParams(num_tokens=16))
    fill(scheduler.server.pool, seed=1)
    loaded = scheduler.load(request)
    assert request.prefix_len == 0
    assert same(bits_at(scheduler.server.pool, loaded), before)


def test_the_pages_go_with_the_request(scheduler: Scheduler) -> None:
    """An aborted one leaves the queue; nothing waits for the garbage collector."""
    request, _ = scheduler.run("r")
    gc.disable()
    try:
        scheduler.retract(request)
        store = scheduler.server.linker.records.storage._store

        def private() -> int:
            uses = store.describe().namespaces
            return sum(x.pages for x in uses if x.namespace.model == "retracted requests")

        assert private() == 2
        del request
        wait_until(lambda: not private())
    finally:
        gc.enable()
