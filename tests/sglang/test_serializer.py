"""The bytes of a page: the same from every layout, and back again bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.cache import HostKVPool
from hisparse.cache.kv_io import read_tokens
from hisparse.cache.serializer import PageSerializer
from hisparse.types import HostLayout, KVSpec

LAYOUTS: tuple[HostLayout, ...] = ("layer_first", "page_first", "page_head")
SHAPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "values of another width": {"v_head_dim": 8},
    "latents": {"attention": "MLA", "num_kv_heads": 1, "head_dim": 24},
    "pages of one token": {"page_size": 1, "attention": "MLA", "num_kv_heads": 1, "head_dim": 24},
}
PAGE_TOKENS, NUM_PAGES = 8, 60


def make_pool(layout: HostLayout, **shape: Any) -> HostKVPool:
    options = {"num_layers": 3, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    options |= {"v_head_dim": 16, "dtype": torch.float32, "page_size": 4} | shape
    return HostKVPool(KVSpec(**options), NUM_PAGES, layout, pin=False)


def fill(pool: HostKVPool, seed: int) -> None:
    """Random bits, NaN among them."""
    rng = torch.Generator().manual_seed(seed)
    for layer in range(pool.kv.num_layers):
        for pages in pool.stored(layer).tensors:
            bits = torch.randint(0, 256, (pages.numel(), pages.element_size()), generator=rng)
            pages.copy_(bits.to(torch.uint8).view(pages.dtype).view(pages.shape))


def bits_at(pool: HostKVPool, slots: Tensor) -> list[Tensor]:
    stored = [read_tokens(pool.stored(i), slots) for i in range(pool.kv.num_layers)]
    return [x.contiguous().view(torch.uint8) for each in stored for x in each.tensors]


def slots_of(pages: list[int]) -> Tensor:
    """Host slots of pages of SGLang."""
    return (torch.tensor(pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_records_move_between_all_layouts(shape: dict[str, Any]) -> None:
    pages, others = slots_of([5, 2, 6]), slots_of([1, 4, 3])
    records = []
    for layout in LAYOUTS:
        source = make_pool(layout, **shape)
        fill(source, seed=0)
        serializer = PageSerializer(source, PAGE_TOKENS, {})
        out = torch.zeros(3, serializer.record_bytes, dtype=torch.uint8)
        serializer.read(serializer.host_pages(pages), out)
        records.append(out)
        target = make_pool(LAYOUTS[LAYOUTS.index(layout) - 1], **shape)
        other = PageSerializer(target, PAGE_TOKENS, {})
        other.write(other.host_pages(others), out)
        for got, expected in zip(bits_at(target, others), bits_at(source, pages), strict=True):
            assert torch.equal(got, expected)
        assert other.describe() == serializer.describe()
        assert other.record_bytes == serializer.record_bytes
    assert torch.equal(records[0], records[1]) and torch.equal(records[0], records[2])


@pytest.mark.parametrize("layers", [2, 3])
def test_entries_of_an_indexer_travel_with_the_page(layers: int) -> None:
    """Which some of the three layers may lack."""
    source, target = (make_pool("layer_first", **SHAPES["pages of one token"]) for _ in range(2))
    fill(source, seed=1)
    rng = torch.Generator().manual_seed(2)
    keys = torch.randint(0, 256, (layers, NUM_PAGES, 16), generator=rng).to(torch.uint8)
    scales = torch.rand(layers, NUM_PAGES, generator=rng)
    entries = {"key": keys.view(torch.float8_e4m3fn), "scale": scales}
    empty = {name: torch.zeros_like(x.view(torch.uint8)).view(x.dtype) if x.dim() == 3
             else torch.zeros_like(x) for name, x in entries.items()}  # fmt: skip
    serializer, other = PageSerializer(source, 8, entries), PageSerializer(target, 8, empty)
    pages, others = serializer.host_pages(slots_of([2])), serializer.host_pages(slots_of([5]))
    out = torch.zeros(1, serializer.record_bytes, dtype=torch.uint8)
    serializer.read(pages, out)
    other.write(others, out)
    assert torch.equal(empty["key"].view(torch.uint8)[:, others], keys[:, pages])
    assert torch.equal(empty["scale"][:, others], scales[:, pages])
    assert not empty["scale"][:, pages].any()
    assert serializer.describe() != PageSerializer(source, 8, {}).describe()


def test_records_of_other_shapes_have_other_descriptions() -> None:
    found = {PageSerializer(make_pool("page_head", **x), 8, {}).describe() for x in SHAPES.values()}
    # Pages of selection are no part of a record.
    assert len(found) == len(SHAPES) - 1
