"""Transfers of all layers in one call, of MLA's one latent, and of rows in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.kernels import gather_pages, gather_tokens, scatter_tokens
from hisparse.types import PagedKV

#: Order of the dimensions in memory: layer, page, head, token, element.
LAYOUTS = {"layer_first": "LPSHD", "page_first": "PLSHD", "page_head": "LPHSD"}


def pools(layout: str, shape: tuple[int, ...], widths: tuple[int, int]) -> PagedKV:
    """Random ``[L, P, H, S, D]`` views."""
    order = LAYOUTS[layout]

    def make(width: int) -> Tensor:
        sizes = dict(zip("LPHSD", (*shape, width), strict=True))
        memory = torch.randn([sizes[x] for x in order])
        return memory.permute([order.index(x) for x in "LPHSD"])

    return PagedKV(*map(make, widths))


def layer(kv: PagedKV, index: int) -> PagedKV:
    return PagedKV(kv.k[index], kv.v[index])


def latent(pages: int, size: int, width: int, rank: int, dtype: torch.dtype) -> PagedKV:
    """MLA: one head, values are the first ``rank`` columns of the keys."""
    memory = torch.randint(0, 256, (pages, size, 1, width * dtype.itemsize), dtype=torch.uint8)
    k = memory.view(dtype).transpose(1, 2)
    return PagedKV(k, k[..., :rank])


@pytest.mark.parametrize("heads", [3, 1], ids=["whole", "per-head"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layers_equal_layer_by_layer(impl: str, layout: str, heads: int) -> None:
    torch.manual_seed(0)
    src = pools(layout, (4, 20, 3, 8), (16, 24))
    dst, expected = (pools("page_head", (4, 30, heads, 8), (16, 24)) for _ in range(2))
    for at in range(2):
        expected[at].copy_(dst[at])
    src_pages = torch.randint(-1, 20, (6, 5), dtype=torch.int32)
    dst_pages = torch.randperm(30, dtype=torch.int32).view(6, 5)
    rows = 3 if heads == 1 else 1
    gather_pages(src, src_pages, dst, dst_pages, heads=rows, impl=impl)
    for index in range(4):
        ours = layer(expected, index)
        gather_pages(layer(src, index), src_pages, ours, dst_pages, heads=rows, impl="reference")
    assert torch.equal(dst.k, expected.k)
    assert torch.equal(dst.v, expected.v)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_all_layers_go_and_come_back(impl: str, layout: str) -> None:
    torch.manual_seed(1)
    pool = pools(layout, (3, 9, 2, 4), (8, 16))
    k, v = torch.randn(3, 10, 2, 8), torch.randn(3, 10, 2, 16)
    slots = torch.randperm(36)[:10]
    scatter_tokens(k, v, pool, slots, impl=impl)
    for index in range(3):
        got = gather_tokens(layer(pool, index), slots, impl="reference")
        assert torch.equal(got[0], k[index])
        assert torch.equal(got[1], v[index])
    back = gather_tokens(pool, slots, impl=impl)
    assert torch.equal(back[0], k)
    assert torch.equal(back[1], v)


@pytest.mark.parametrize("size", [1, 64], ids=lambda s: f"page{s}")
@pytest.mark.parametrize(
    ("width", "rank", "dtype"),
    [(576, 512, torch.bfloat16), (656, 512, torch.uint8), (3, 2, torch.float64)],
    ids=["1152B", "656B", "24B"],
)
def test_a_latent_moves_once_and_whole(
    impl: str, width: int, rank: int, dtype: torch.dtype, size: int
) -> None:
    """The columns that only keys have arrive too."""
    torch.manual_seed(2)
    src, dst = (latent(40, size, width, rank, dtype) for _ in range(2))
    expected = dst.k.clone()
    src_pages = torch.randint(-1, 40, (2, 9), dtype=torch.int32)
    dst_pages = torch.randperm(40, dtype=torch.int32)[:18].view(2, 9)
    for a, b in zip(src_pages.flatten().tolist(), dst_pages.flatten().tolist(), strict=True):
        if a >= 0:
            expected[b] = src.k[a]
    gather_pages(src, src_pages, dst, dst_pages, impl=impl)
    assert torch.equal(dst.k.view(torch.uint8), expected.view(torch.uint8))

    slots = torch.randperm(40 * size)[:25]
    k, v = gather_tokens(src, slots, impl=impl)
    assert v.data_ptr() == k.data_ptr()
    assert v.shape == (25, 1, rank)
    scatter_tokens(k, v, dst, slots, impl=impl)
    again, _ = gather_tokens(dst, slots, impl="reference")
    assert torch.equal(again.view(torch.uint8), k.view(torch.uint8))
