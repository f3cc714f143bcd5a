"""From the hook on SGLang's retraction, through the linker and the file store, and back."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from test_serializer import PAGE_TOKENS, bits_at, fill, slots_of
from test_storage_weights import Server

from hisparse.sglang.features.storage.pages import FilePages
from hisparse.sglang.features.storage.swap import around_release_req
from hisparse.sglang.session import require_session
from hisparse.storage import FileStore

pytestmark = pytest.mark.filterwarnings("ignore")

#: Pages of SGLang that a request has, and those that it gets when it comes back.
PAGES, OTHERS = [1, 2, 3, 4, 5], [7, 8, 9, 10]


class Request:
    """What the linker reads of SGLang's ``Req``: 33 tokens, two pages in the radix cache."""

    def __init__(self, **changes: Any) -> None:
        self.rid = "r"
        self.origin_input_ids = array("q", range(20))
        self.output_ids = array("q", range(100, 113))
        self.extra_key = self.cache_salt = self.input_embeds = None
        self.skip_radix_cache_insert = False
        self.kv = SimpleNamespace(cache_protected_len=16, kv_committed_len=32, req_pool_idx=1)
        self.__dict__.update(changes)

    def hashes(self) -> list[str]:
        """Names of the pages at the next look-up, as SGLang makes them."""
        tokens = self.origin_input_ids + self.output_ids
        key = RadixKey(tokens, self.extra_key, limit=len(tokens) - 1)[: 4 * PAGE_TOKENS]
        return list(get_storage_hash_str(key, None, page_size=PAGE_TOKENS))


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def make(**options: Any) -> Server:
        server = Server(tmp_path, monkeypatch, **({"swap_min_tokens": 0} | options))
        table = torch.zeros(3, 64, dtype=torch.int32)
        table[1, : len(PAGES) * PAGE_TOKENS] = slots_of(PAGES)
        require_session().req_to_token_pool = SimpleNamespace(req_to_token=table)
        return server

    return make


def retract(server: Server, request: Request, **options: Any) -> None:
    """SGLang's retraction: the slots get other contents."""

    def original(**arguments: Any) -> bool:
        assert arguments["req"] is request and arguments["remaing_req_count"] == 3
        fill(server.pool, seed=1)
        return True

    assert around_release_req(original, req=request, remaing_req_count=3, **options)


def transfer(request: Request, first: int = 0) -> list[Any]:
    slots = slots_of(OTHERS[first:])
    return [SimpleNamespace(name=PoolName.KV, keys=request.hashes()[first:], device_indices=slots)]


def share_prompt(server: Server, request: Request) -> None:
    """The radix cache offloads the first two pages."""
    keys, slots = request.hashes()[:2], slots_of(PAGES[:2])
    server.linker.offload([SimpleNamespace(name=PoolName.KV, keys=keys, device_indices=slots)])
    server.linker._writers[0].drain(20)
    assert server.linker.pop_completed_offload()


def count(server: Server, *names: str) -> list[int]:
    totals = server.counters.totals()
    return [totals[f"storage_{name}"] for name in names]


@pytest.mark.parametrize("key", [None, "an adapter"])
@pytest.mark.parametrize("committed", [32, 33], ids=["", "the last token is in the works"])
def test_a_request_gets_shared_pages_and_its_own(
    start: Start, key: str | None, committed: int
) -> None:
    server = start()
    request = Request(extra_key=key)
    request.kv.kv_committed_len = committed
    share_prompt(server, request)
    sparse = server.linker.serializer.host_pages(slots_of(PAGES[2:4]))
    server.exact.write(sparse, torch.zeros(4, dtype=torch.bool))
    before = bits_at(server.pool, slots_of(PAGES[:4]))
    retract(server, request)
    assert count(server, "swapped_pages", "failed_swaps") == [2, 0]
    assert server.linker.lookup("r", transfer(request)) == [4]
    assert server.linker.lookup("another", transfer(request)) == [2]
    assert server.linker.load("r", transfer(request))
    after = bits_at(server.pool, slots_of(OTHERS))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    pages = server.linker.serializer.host_pages(slots_of(OTHERS))
    assert server.exact.read(pages).tolist() == [True] * 4 + [False] * 4
    assert count(server, "swapped_in_pages", "failed_swaps") == [2, 0]
    assert server.linker.lookup("r", transfer(request)) == [2], "they are loaded once"


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"skip_radix_cache_insert": True}, {}),
        ({"input_embeds": [[0.5]]}, {}),
        ({"output_ids": array("q", range(100, 104))}, {}),
        ({}, {"offload_kv": False}),
    ],
    ids=["failed", "embeddings", "less than a page", "does not come back"],
)
def test_some_requests_are_not_swapped(
    start: Start, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    server, request = start(), Request(**changes)
    retract(server, request, **options)
    assert count(server, "swapped_pages", "failed_swaps") == [0, 0]


@pytest.mark.parametrize(("setting", "swapped"), [(16, 2), (17, 0), (None, 0)], ids=str)
def test_the_threshold_can_be_set(start: Start, setting: Any, swapped: int) -> None:
    """It counts the tokens of pages that host memory loses."""
    server, request = start(swap_min_tokens=setting), Request()
    retract(server, request)
    assert count(server, "swapped_pages") == [swapped]


def test_a_backend_that_removes_nothing_swaps_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = property(lambda _: None, lambda *_: None)
    monkeypatch.setattr(FilePages, "remover", nothing, raising=False)
    with caplog.at_level("INFO", logger="hisparse"):
        server, request = start(), Request()
    assert "backend file does not remove pages; retracted requests are computed" in caplog.text
    retract(server, request)
    assert count(server, "swapped_pages") == [0]


def test_new_weights_end_swaps(start: Start) -> None:
    server, request = start(), Request()
    retract(server, request)
    update = SimpleNamespace(_session=None)
    server.state.note_update(update)
    server.linker.reset()
    assert server.linker.lookup("r", transfer(request, first=2)) == []
    server.state.note_update(update)
    retract(server, request)
    assert count(server, "swapped_pages") == [2]


def test_a_server_that_ends_leaves_shared_pages_only(start: Start, tmp_path: Path) -> None:
    server, request = start(), Request()
    share_prompt(server, request)
    retract(server, request)
    server.linker.close()
    with FileStore(tmp_path, create=False) as store:
        assert [use.pages for use in store.describe().namespaces if use.pages] == [2]


def test_ranks_swap_a_request_together_or_not_at_all(start: Start) -> None:
    """Pages of only one rank are of no use: another has not written its own in time."""
    server, request = start(), Request()
    asked = []
    ranks = SimpleNamespace(
        all_of=lambda mine: asked.append(mine), least_of=lambda mine: mine, shared=False
    )
    server.linker.ranks = ranks
    retract(server, request)
    assert asked == [True]
    assert server.linker.lookup("r", transfer(request, first=2)) == []
