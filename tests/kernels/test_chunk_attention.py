"""``chunk_attention`` of every implementation against float64 attention with an explicit mask."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from hisparse.kernels import chunk_attention
from hisparse.types import AttentionRule
from tests.sizes import sized

#: Triton's interpreter takes a second for what a kernel does in a microsecond.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHRINK = 4 if INTERPRETED else 1
LARGEST = 600 // SHRINK
EXAMPLES = sized(5, 60) if INTERPRETED else sized(25, 400)


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and lse in float64, of SDPA with a mask and of the logits."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        x.double().transpose(0, 1)
        for x in (q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))
    )
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    mask = mask.tril() if causal else mask
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    logits = (q @ k.transpose(1, 2)).masked_fill(~mask, -torch.inf)
    return out.transpose(0, 1), logits.logsumexp(-1).transpose(0, 1)


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool, impl: str) -> None:
    out, lse = chunk_attention(q, k, v, causal=causal, impl=impl)
    want_out, want_lse = expected(q, k, v, causal)
    assert out.dtype == lse.dtype == torch.float32
    assert_close(out.double(), want_out, rtol=1e-4, atol=1e-5)
    assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "group", "dims"),
    [
        pytest.param(1, 1, 1, 1, (8, 8), id="one-token"),
        pytest.param(33, 700, 3, 3, (64, 64), id="gqa"),
        pytest.param(300, 513, 1, 5, (16, 16), id="mqa"),
        pytest.param(97, 255, 4, 1, (128, 128), id="mha"),
        pytest.param(40, 300, 1, 4, (96, 64), id="latent"),
        pytest.param(21, 50, 2, 2, (7, 45), id="odd-widths"),
    ],
)
def test_attends_as_sdpa_does(
    impl: str,
    dtype: torch.dtype,
    tokens: int,
    keys: int,
    heads: int,
    group: int,
    dims: tuple[int, int],
    causal: bool,
) -> None:
    tokens, keys = -(-tokens // SHRINK), -(-keys // SHRINK)
    keys = tokens if causal else keys
    q = torch.randn(tokens, heads * group, dims[0]) * 0.3
    # As a staging tile lies in memory, and as a framework may pass it: heads before tokens.
    k = torch.randn(keys, heads, dims[0]).to(dtype)
    v = torch.randn(heads, keys, dims[1]).to(dtype).transpose(0, 1)
    check(q, k, v, causal, impl)


@pytest.mark.sweeps
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tokens=st.integers(1, LARGEST),
    keys=st.integers(1, LARGEST),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_ragged_sizes(
    impl: str,
    tokens: int,
    keys: int,
    heads: int,
    group: int,
    widths: tuple[int, int],
    scale: float,
    causal: bool,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys = tokens if causal else keys
    q = torch.randn(tokens, heads * group, widths[0], generator=rng) * scale * widths[0] ** -0.5
    k, v = (torch.randn(keys, heads, width, generator=rng) for width in widths)
    check(q, k, v, causal, impl)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "group", "width", "rank"),
    [pytest.param(1, 5, 48, 32, id="latent"), pytest.param(2, 3, 40, None, id="gqa")],
)
def test_a_raw_query_is_scaled_in_float32(
    impl: str,
    dtype: torch.dtype,
    heads: int,
    group: int,
    width: int,
    rank: int | None,
    causal: bool,
) -> None:
    """With keys behind each other's heads, and a query that is a part of a projection."""
    torch.manual_seed(0)
    tokens, keys = 70, 70 if causal else 131
    q = torch.randn(tokens, heads * group, 2 * width).to(dtype)[..., :width]
    k = torch.randn(keys, heads, width).to(dtype)
    v = torch.randn(keys, heads, 24).to(dtype) if rank is None else k[..., :rank]
    scale = width**-0.5
    out, lse = chunk_attention(q, k, v, causal=causal, rule=AttentionRule(scale), impl=impl)
    want_out, want_lse = expected(q.double() * scale, k, v, causal)
    assert out.dtype in (torch.float32, dtype)
    coarse = out.dtype != torch.float32
    close = {"rtol": 1e-2, "atol": 6e-3} if coarse else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(out.double(), want_out, **close)
    assert lse.dtype == torch.float32
    assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_later_keys_do_not_count_however_large(impl: str) -> None:
    """A mask that only lowers logits would fail: each key's logit is far above all before it."""
    q = torch.ones(300, 1, 1)
    k = torch.arange(300.0)[:, None, None] * 100
    out, lse = chunk_attention(q, k, k / 100, causal=True, impl=impl)
    assert_close(out, torch.arange(300.0)[:, None, None])
    assert_close(lse, torch.arange(300.0)[:, None] * 100)


def test_without_keys_lse_is_minus_infinity(impl: str) -> None:
    empty = torch.empty(0, 2, 4)
    out, lse = chunk_attention(torch.randn(5, 4, 4), empty, empty, causal=False, impl=impl)
    assert_close(out, torch.zeros(5, 4, 4))
    assert_close(lse, torch.full((5, 4), -torch.inf))


def test_threads_change_no_bit() -> None:
    q, k, v = torch.randn(700, 6, 32), *torch.randn(2, 700, 2, 32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(chunk_attention(q, k, v, causal=True))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)
