"""What a transfer engine is told of the pools: bytes that it moves become the same tokens."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from hisparse.cache import HostKVPool
from hisparse.cache.kv_io import read_tokens, write_tokens
from hisparse.sglang import session
from hisparse.sglang.features.disaggregation import transfer
from hisparse.sglang.features.disaggregation.transfer import (
    Buffers,
    Transfers,
    kv_buffers,
    scale_buffers,
)
from hisparse.sglang.kv_pool import HiSparseMHAPool
from hisparse.types import KVSpec
from tests.shapes import small_spec

HEADS = small_spec()
SPECS = {
    "heads": HEADS,
    "int8": small_spec(head_dim=16, v_head_dim=16, kv_cache_dtype="int8"),
    "fp8": small_spec(head_dim=16, v_head_dim=16, kv_cache_dtype="fp8_e4m3"),
    "latents": small_spec(num_kv_heads=1, head_dim=16, v_head_dim=12, attention="MLA"),
    "fp8 latents": small_spec(
        num_kv_heads=1, head_dim=48, v_head_dim=32, attention="MLA", kv_cache_dtype="fp8_e4m3"
    ),
}
PAGE, NUM_PAGES = 16, 12


def move(source: Buffers, target: Buffers, pages: dict[int, int]) -> None:
    """Copy pages of SGLang's, by nothing but addresses and lengths."""
    for old, new, length in zip(source.pointers, target.pointers, source.item_lengths, strict=True):
        for a, b in pages.items():
            ctypes.memmove(new + b * length, old + a * length, length)
    assert source.item_lengths == target.item_lengths


def slots(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def fill(host: HostKVPool, where: torch.Tensor) -> None:
    for layer in range(host.kv.num_layers):
        k = torch.randn(len(where), host.kv.num_kv_heads, host.kv.head_dim)
        v = host.format.values_of(k, torch.randn_like(k))
        write_tokens(host.format.encode(k, v), host.stored(layer), where)


def assert_same(
    one: HostKVPool, here: torch.Tensor, other: HostKVPool, there: torch.Tensor
) -> None:
    for layer in range(one.kv.num_layers):
        a, b = (read_tokens(h.stored(layer), s) for h, s in ((one, here), (other, there)))
        for x, y in zip(one.format.decode(a), one.format.decode(b), strict=True):
            assert x.any() and torch.equal(x, y)


def pools(spec: KVSpec) -> tuple[HostKVPool, HostKVPool]:
    one, other = (HostKVPool(spec, n, "layer_first", pin=False) for n in (NUM_PAGES, NUM_PAGES + 8))
    return one, other


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_moved_pages_hold_the_same_tokens(spec: KVSpec) -> None:
    one, other = pools(spec)
    fill(one, slots([0, 2]))
    move(kv_buffers(one, PAGE), kv_buffers(other, PAGE), {0: 4, 2: 1})
    move(scale_buffers(one, PAGE), scale_buffers(other, PAGE), {0: 4, 2: 1})
    assert_same(one, slots([0, 2]), other, slots([4, 1]))
    described = sum(kv_buffers(one, PAGE).lengths) + sum(scale_buffers(one, PAGE).lengths)
    assert described == one.num_bytes


def test_sglangs_own_pool_has_the_same_order_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = SimpleNamespace(spec=HEADS, resolved=SimpleNamespace(layout="layer_first"))
    state = SimpleNamespace(setup=setup, ranks=None)
    monkeypatch.setattr(session, "_session", state)
    options: dict[str, Any] = {"page_size": PAGE, "dtype": torch.float32, "head_num": 2}
    options |= {"head_dim": 8, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}
    pool_class = type("Pool", (Transfers, HiSparseMHAPool), {})
    stock, ours = MHATokenToKVPool(64, **options), pool_class(32, **options)
    stock.start_layer = 0
    for layer in range(2):
        stock.k_buffer[layer].normal_()
        stock.v_buffer[layer].normal_()
    theirs = Buffers(*stock.get_contiguous_buf_infos())
    move(theirs, ours.get_contiguous_buf_infos(), {3: 1})
    for layer in range(2):
        assert torch.equal(ours.get_key_buffer(layer)[16:32], stock.k_buffer[layer][48:64])
        assert torch.equal(ours.get_value_buffer(layer)[16:32], stock.v_buffer[layer][48:64])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_copies_of_a_retracted_request_come_back(
    spec: KVSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its last page too, which is not full, and with an indexer's keys."""
    one, other = pools(spec)
    here, there = slots([1, 2])[:26], slots([3, 0])[:26]
    fill(one, here)
    keys, back = (torch.zeros(2, h.num_pages, 5) for h in (one, other))
    keys.normal_()
    restored, pool = back.to(torch.float8_e4m3fn), Transfers()
    entries = iter([{"keys": keys.to(torch.float8_e4m3fn)}, {"keys": restored}])
    monkeypatch.setattr(transfer, "_stored_entries", lambda: next(entries))
    pool.host = one
    copies = pool.get_cpu_copy(here)
    pool.host = other
    pool.load_cpu_copy(copies, there)
    assert_same(one, here, other, there)
    pages = [slots[::4] // 4 for slots in (here, there)]
    assert torch.equal(
        restored.float()[:, pages[1]], keys.to(torch.float8_e4m3fn).float()[:, pages[0]]
    )
