"""``key_score`` of every implementation against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hisparse.cache.host_pool import HOST_LAYOUTS
from hisparse.kernels import (
    QUANTIZED,
    HostKeys,
    LatentRow,
    decode_latents,
    dequantize,
    encode_latents,
    key_score,
    quantize,
)
from tests.sizes import sized

IMPLS = ["reference", "cpu"]
HOST_PAGES = 40


LATENTS = "latents"
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def strided(pages: Tensor, layout: str) -> Tensor:
    """``[host pages, Hkv, S, D]``, strided as a layer of the host pool of that layout."""
    order = HOST_LAYOUTS[layout]  # type: ignore[index]
    memory = torch.stack([pages, pages]).permute(["LPHSD".index(x) for x in order]).contiguous()
    return memory.permute([order.index(x) for x in "LPHSD"])[1]


def pool(layout: str, kv_heads: int, size: int, dim: int, dtype: str) -> tuple[HostKeys, Tensor]:
    """A layer's keys as they are stored, and decoded: ``[host pages, Hkv, S, D] float64``."""
    keys = torch.randn(HOST_PAGES, kv_heads, size, dim) * torch.rand(kv_heads, size, 1) * 3
    if dtype == LATENTS:
        row = LatentRow(dim - dim // 4, dim // 4)
        rows = encode_latents(keys, row)
        decoded = torch.empty(HOST_PAGES, size, dim)
        decode_latents(rows[:, 0], torch.arange(HOST_PAGES, dtype=torch.int32), row, decoded)
        return HostKeys(strided(rows, layout), row=row), decoded[:, None].double()
    if DTYPES[dtype] not in QUANTIZED:
        stored = strided(keys.to(DTYPES[dtype]), layout)
        return HostKeys(stored), stored.double()
    stored = quantize(keys, keys, DTYPES[dtype])
    dequantize(stored, (keys, torch.empty_like(keys)))
    return HostKeys(strided(stored.k, layout), stored.scales), keys.double()


def oracle(
    query: Tensor, keys: Tensor, table: Tensor, num_pages: Tensor, reduce: str, cap: float
) -> Tensor:
    """Request by request, page by page, in float64."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.full((*query.shape[:2], table.shape[1]), -torch.inf, dtype=torch.float64)
    for b, count in enumerate(num_pages.tolist()):
        for page in range(count):
            own = keys[table[b, page]].repeat_interleave(group, dim=0)  # [Hq, S, D]
            logits = (own @ query[b].double()[..., None])[..., 0]
            logits = cap * (logits / cap).tanh() if cap else logits
            scores[b, :, page] = logits.amax(-1) if reduce == "max" else logits.logsumexp(-1)
    return scores


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("reduce", ["max", "lse"])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, LATENTS])
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "size", "dim", "pages", "cap"),
    [
        (3, 4, 2, 16, 24, 37, 0.0),
        (1, 9, 3, 1, 64, 70, 3.0),
        (2, 7, 1, 5, 5, 1, 0.0),
        (2, 2, 2, 33, 128, 9, 3.0),
    ],
)
def test_scores_are_those_of_float64(
    impl: str,
    reduce: str,
    layout: str,
    dtype: str,
    batch: int,
    q_heads: int,
    kv_heads: int,
    size: int,
    dim: int,
    pages: int,
    cap: float,
) -> None:
    if dtype == LATENTS:
        kv_heads = 1
    query = torch.randn(batch, q_heads, dim)
    keys, decoded = pool(layout, kv_heads, size, dim, dtype)
    # The table is a part of a wider one, as the coordinator hands it over.
    table = torch.randint(HOST_PAGES, (batch, pages + 3), dtype=torch.int32)[:, :pages]
    num_pages = torch.randint(pages + 1, (batch,), dtype=torch.int32)
    num_pages[0] = pages
    inputs = query, keys, table, num_pages
    scores = key_score(*inputs, reduce=reduce, logit_cap=cap, impl=impl)  # type: ignore[arg-type]
    expected = oracle(query, decoded, table, num_pages, reduce, cap)
    assert_close(scores.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=sized(20, 400), deadline=None)
@given(
    batch=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    size=st.integers(1, 18),
    dim=st.integers(1, 40),
    pages=st.integers(1, 90),
    reduce=st.sampled_from(["max", "lse"]),
    seed=st.integers(0, 2**20),
)
def test_another_request_changes_no_bit_of_the_scores(
    impl: str,
    batch: int,
    kv_heads: int,
    group: int,
    size: int,
    dim: int,
    pages: int,
    reduce: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    query = torch.randn(batch, kv_heads * group, dim)
    keys, _ = pool("page_head", kv_heads, size, dim, "fp32")
    table = torch.randint(HOST_PAGES, (batch, pages), dtype=torch.int32)
    num_pages = torch.randint(pages + 1, (batch,), dtype=torch.int32)
    inputs = query, keys, table, num_pages
    everything = key_score(*inputs, reduce=reduce, impl=impl)  # type: ignore[arg-type]
    alone = key_score(*(x[:1] if x is not keys else x for x in inputs), reduce=reduce, impl=impl)  # type: ignore[arg-type]
    assert torch.equal(alone, everything[:1])


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_that_are_not_there_are_not_read(impl: str) -> None:
    keys = torch.full((3, 1, 4, 8), torch.nan)
    keys[1] = 1.0
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    one = torch.tensor([1], dtype=torch.int32)
    scores = key_score(torch.ones(1, 1, 8), HostKeys(keys), table, one, impl=impl)
    assert scores.tolist() == [[[8.0, -torch.inf]]]
