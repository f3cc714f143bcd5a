"""``key_score`` of every implementation against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hisparse.cache.host_pool import HOST_LAYOUTS
from hisparse.kernels import key_score
from tests.sizes import sized

IMPLS = ["reference", "cpu"]
HOST_PAGES = 40


def pool(layout: str, kv_heads: int, size: int, dim: int, dtype: torch.dtype) -> Tensor:
    """One layer's ``[host pages, Hkv, S, D]``, strided as in the host pool of that layout."""
    sizes = {"L": 2, "P": HOST_PAGES, "S": size, "H": kv_heads, "D": dim}
    order = HOST_LAYOUTS[layout]  # type: ignore[index]
    keys = torch.randn([sizes[x] for x in order]).to(dtype)
    return keys.permute([order.index(x) for x in "LPHSD"])[1]


def oracle(query: Tensor, keys: Tensor, table: Tensor, num_pages: Tensor, reduce: str) -> Tensor:
    """Request by request, page by page, in float64."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.full((*query.shape[:2], table.shape[1]), -torch.inf, dtype=torch.float64)
    for b, count in enumerate(num_pages.tolist()):
        for page in range(count):
            own = keys[table[b, page]].double().repeat_interleave(group, dim=0)  # [Hq, S, D]
            logits = (own @ query[b].double()[..., None])[..., 0]
            scores[b, :, page] = logits.amax(-1) if reduce == "max" else logits.logsumexp(-1)
    return scores


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("reduce", ["max", "lse"])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "size", "dim", "pages"),
    [(3, 4, 2, 16, 24, 37), (1, 9, 3, 1, 64, 70), (2, 7, 1, 5, 5, 1), (2, 2, 2, 33, 128, 9)],
)
def test_scores_are_those_of_float64(
    impl: str,
    reduce: str,
    layout: str,
    dtype: torch.dtype,
    batch: int,
    q_heads: int,
    kv_heads: int,
    size: int,
    dim: int,
    pages: int,
) -> None:
    query, keys = torch.randn(batch, q_heads, dim), pool(layout, kv_heads, size, dim, dtype)
    # The table is a part of a wider one, as the coordinator hands it over.
    table = torch.randint(HOST_PAGES, (batch, pages + 3), dtype=torch.int32)[:, :pages]
    num_pages = torch.randint(pages + 1, (batch,), dtype=torch.int32)
    num_pages[0] = pages
    scores = key_score(query, keys, table, num_pages, reduce=reduce, impl=impl)  # type: ignore[arg-type]
    expected = oracle(query, keys, table, num_pages, reduce)
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
    keys = pool("page_head", kv_heads, size, dim, torch.float32)
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
    scores = key_score(torch.ones(1, 1, 8), keys, table, one, impl=impl)
    assert scores.tolist() == [[[8.0, -torch.inf]]]
