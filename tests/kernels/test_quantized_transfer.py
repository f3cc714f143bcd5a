"""Eight-bit pages and their scales are moved like any others: byte for byte, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.cache.host_pool import HOST_LAYOUTS, HostKVPool
from hisparse.kernels import gather_pages, gather_tokens, quantize, scatter_tokens
from hisparse.types import PagedKV, StoredKV
from tests.shapes import small_spec

TOKENS, HEADS = 60, 3


def pools(stored: StoredKV) -> list[PagedKV]:
    """What one call moves each."""
    assert stored.scales is not None
    return [stored.kv, PagedKV(stored.scales, stored.scales)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def host_of(layout: str, size: int, widths: tuple[int, int]) -> HostKVPool:
    heads = {"num_q_heads": HEADS, "num_kv_heads": HEADS}
    heads |= {"head_dim": widths[0], "v_head_dim": widths[1]}
    spec = small_spec(**heads, dtype=torch.bfloat16, page_size=size, kv_cache_dtype="fp8_e4m3")
    return HostKVPool(spec, 80 // size, layout, pin=False)


@pytest.mark.parametrize("size", [16, 8, 1], ids=lambda s: f"page{s}")
@pytest.mark.parametrize("widths", [(64, 64), (128, 32), (20, 6)], ids=str)
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_tokens_written_are_read_and_their_pages_arrive(
    impl: str, layout: str, widths: tuple[int, int], size: int
) -> None:
    """Tokens to host slots, from there as tokens, and as pages of all heads or of one."""
    rng = torch.Generator().manual_seed(size)
    k, v = (torch.randn(TOKENS, HEADS, d, generator=rng) * 30 for d in widths)
    new = quantize(k, v, torch.float8_e4m3fn, impl="reference")
    host = host_of(layout, size, widths).stored(1)
    slots = torch.randperm(80 - size, generator=rng)[:TOKENS] + size
    for moved, to in zip(pools(new), pools(host), strict=True):
        scatter_tokens(moved.k, moved.v, to, slots, impl=impl)
        read = gather_tokens(to, slots, impl=impl)
        assert all(same(a, b) for a, b in zip(read, moved, strict=True))

    num = host.k.shape[0]
    for rows, heads in ((1, 1), (2 * HEADS, HEADS)):
        stored_heads = HEADS if heads == 1 else 1
        count = rows * num
        # As device pages lie in memory: a token's heads side by side, scales page by page.
        codes = [
            torch.zeros(count, size, stored_heads, d, dtype=torch.float8_e4m3fn).transpose(1, 2)
            for d in widths
        ]
        device = StoredKV(*codes, torch.zeros(count, stored_heads, size, 2, dtype=torch.uint8))
        source = torch.arange(num, dtype=torch.int32).expand(rows, -1).contiguous()
        target = torch.randperm(count, generator=rng).view(rows, num).int()
        source[0, 0] = -1
        flat = [
            PagedKV(*(x.view(*x.shape[:2], 1, -1) for x in pools(y)[1])) for y in (host, device)
        ]
        for src, dst in ((host.kv, device.kv), (flat[0], flat[1])):
            gather_pages(src, source, dst, target, heads=heads, impl=impl)
        for there, here in zip(device.tensors, host.tensors, strict=True):
            for row in range(rows):
                which = slice(None) if heads == 1 else [row % heads]
                first = 1 if row == 0 else 0
                assert same(there[target[row, first:].long()], here[first:, which])
        assert not device.k[int(target[0, 0])].float().any()
