"""``append_tokens`` and the copies of ``promote_tail``: new tokens in, full tail pages out."""

from __future__ import annotations

import pytest
import torch

from hisparse.kernels import TailPools, append_tokens, promote_tail
from hisparse.types import PagedKV
from tests.kernels.test_transfer import LAYOUTS, assert_same_bytes, pages
from tests.kernels.world import i32, indexed

SIZE = 4


def pools(layout: str, kv_heads: int, heads: int, widths: tuple[int, int]) -> tuple[PagedKV, ...]:
    """Host pages, and device pages of rows of all heads or of one head each."""
    stored = kv_heads if heads == 1 else 1
    return (
        pages(layout, 9, kv_heads, SIZE, widths, fill=1.0),
        pages("page_first", 40, stored, SIZE, widths, fill=2.0),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kv_heads", "heads"), [(3, 1), (2, 2), (2, 4)], ids=["layer", "kv-head", "query-head"]
)
@pytest.mark.parametrize("widths", [(8, 16), (5, 3)], ids=["wide", "odd"])
def test_each_token_goes_to_its_host_slot_and_to_its_rows(
    impl: str, layout: str, kv_heads: int, heads: int, widths: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    host, device = pools(layout, kv_heads, heads, widths)
    k, v = (torch.randn(2, kv_heads, width) for width in widths)
    host_slots = torch.tensor([5, 35])
    tail_slots = torch.arange(2 * heads) * 12 + 3
    append_tokens(k, v, host, host_slots, device, tail_slots, impl=impl)
    for stored, new in zip(host, (k, v), strict=True):
        assert torch.equal(stored[host_slots // SIZE, :, host_slots % SIZE], new)
        assert int((stored != 1).any(1).any(-1).sum()) == 2
    for stored, new in zip(device, (k, v), strict=True):
        got = stored[tail_slots // SIZE, :, tail_slots % SIZE]
        own = (
            new
            if heads == 1
            else new.repeat_interleave(heads // kv_heads, 1).view(2 * heads, 1, -1)
        )
        assert torch.equal(got, own)
        assert int((stored != 2).any(1).any(-1).sum()) == 2 * heads


def test_values_that_are_a_view_of_keys_are_written_once(impl: str) -> None:
    """As with MLA, whose values are the first columns of its keys."""
    host, device = (PagedKV(x, x[..., :6]) for x in (torch.zeros(3, 1, SIZE, 8) for _ in "hd"))
    k = torch.randn(1, 1, 8)
    append_tokens(k, k[..., :6] + 1, host, torch.tensor([5]), device, torch.tensor([2]), impl=impl)
    assert torch.equal(host.k[1, :, 1], k[0])
    assert torch.equal(device.k[0, :, 2], k[0])


def test_slots_beyond_the_pools_are_skipped(unverified: str) -> None:
    host, device = pools("layer_first", 2, 2, (8, 8))
    token = torch.randn(1, 2, 8)
    before = PagedKV(*(x.clone() for x in host)), PagedKV(*(x.clone() for x in device))
    nowhere = (torch.tensor([36]), device, torch.tensor([160, -1]))
    append_tokens(token, token, host, *nowhere, impl=unverified)
    assert_same_bytes(host, before[0])
    assert_same_bytes(device, before[1])


@pytest.mark.parametrize(
    ("kv_heads", "heads"), [(3, 1), (2, 2), (2, 4)], ids=["layer", "kv-head", "query-head"]
)
@pytest.mark.parametrize("given", ["k", "v", "kv"])
def test_full_tail_pages_are_copied_out(impl: str, kv_heads: int, heads: int, given: str) -> None:
    """The copy is of the page that was the tail, also in a row without capacity."""
    torch.manual_seed(0)
    _, device = pools("page_first", kv_heads, heads, (8, 16))
    for pool in device:
        pool.copy_(torch.randn(pool.shape))
    count = 3 * heads
    order = torch.arange(2, dtype=torch.int32).repeat(count, 1)
    state = indexed(torch.full_like(order, -1), order, order + 30)
    tails = torch.arange(count, dtype=torch.int32) + 4
    capacity = i32([2] * 2 * heads + [0] * heads)
    filled = torch.tensor([True, False, True]).repeat_interleave(heads)
    copies = promote_tail(
        torch.arange(count),
        i32([7, 8, 9]),
        filled,
        capacity,
        state,
        tails,
        pools=TailPools(
            device.k if "k" in given else None, device.v if "v" in given else None, kv_heads
        ),
        impl=impl,
    )
    for copy, name in zip(copies, given, strict=True):
        pool = getattr(device, name)
        assert copy.shape == (3, kv_heads, *pool.shape[2:])
        for request in (0, 2):
            first = 4 + request * heads
            own = pool[first] if heads == 1 else pool[first : first + heads : heads // kv_heads, 0]
            assert torch.equal(copy[request], own)
    assert tails[:heads].tolist() == [30] * heads
    assert state.slot_pages[:heads, 0].tolist() == [7] * heads
    assert tails[heads:].tolist() == list(range(4 + heads, 4 + count))
