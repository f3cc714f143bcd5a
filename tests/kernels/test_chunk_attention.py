"""``chunk_attention`` of every implementation against float64 attention with an explicit mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hisparse.kernels import chunk_attention
from hisparse.types import UNSCALED, AttentionRule
from tests.kernels.test_attention import BF16, CAPS, FP16, FP32, INTERPRETED, assert_near, attend
from tests.sizes import sized

SHRINK = 4 if INTERPRETED else 1
LARGEST = 600 // SHRINK
EXAMPLES = sized(5, 60) if INTERPRETED else sized(30, 400)
WINDOWS = [1, 32] if INTERPRETED else [1, 2, 31, 32, 33, 127, 200, 5000]


def visible(tokens: int, keys: int, causal: bool, window: int, first_key: int) -> Tensor:
    """``[T, Tk] bool``, from the definition."""
    query, key = torch.arange(tokens)[:, None], first_key + torch.arange(keys)
    seen = key <= query if causal else torch.ones(tokens, keys, dtype=torch.bool)
    return seen & (key > query - window) if window else seen


def check(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, causal: bool, first_key: int, impl: str
) -> None:
    got = chunk_attention(q, k, v, causal=causal, rule=rule, first_key=first_key, impl=impl)
    seen = visible(len(q), len(k), causal, rule.window, first_key)
    # Matrix registers of a CPU multiply weights of 16 bits, as GPUs do.
    coarse = impl == "cpu" and q.dtype == k.dtype == BF16
    assert_near(got, attend(q, k, v, rule, seen), q, coarse)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "prefix"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
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
def test_attends_a_chunk_or_all_keys(
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
    check(q, k, v, UNSCALED, causal, 0, impl)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("first_key", [0, -1, -32, -150, -4000], ids=lambda x: f"key{x}")
def test_prefill_attends_within_the_window(
    impl: str, cap: float, window: int, first_key: int, dtype: torch.dtype
) -> None:
    """A chunk of 140 tokens over itself, and over a tile of its prefix, near, far, or before all
    windows: then rows are empty."""
    torch.manual_seed(window)
    tokens = 35 if INTERPRETED else 140
    keys = tokens if first_key == 0 else min(-first_key, 150)
    shapes = (tokens, 4, 24), (keys, 2, 24), (keys, 2, 16)
    q, k, v = (torch.randn(*x).to(dtype) for x in shapes)
    check(q, k, v, AttentionRule(0.5, cap, window), first_key == 0, first_key, impl)


@pytest.mark.sweeps
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tokens=st.integers(1, LARGEST),
    keys=st.integers(1, LARGEST),
    before=st.integers(0, 300),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    scale=st.sampled_from([0.02, 0.4, 1.0]),
    cap=st.sampled_from(CAPS),
    window=st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 700)),
    causal=st.booleans(),
    dtype=st.sampled_from([FP32, BF16]),
    seed=st.integers(0, 2**31),
)
def test_ragged_sizes(
    impl: str,
    tokens: int,
    keys: int,
    before: int,
    heads: int,
    group: int,
    widths: tuple[int, int],
    scale: float,
    cap: float,
    window: int,
    causal: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    first_key = -before if causal else -keys - before
    keys = tokens + before if causal else keys
    q = torch.randn(tokens, heads * group, widths[0], generator=rng).to(dtype)
    k, v = (torch.randn(keys, heads, width, generator=rng).to(dtype) for width in widths)
    check(q, k, v, AttentionRule(scale, cap, window), causal, first_key, impl)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "prefix"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
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
    check(q, k, v, AttentionRule(width**-0.5), causal, 0, impl)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("new", [1, 2, 13, 100, 299])
def test_the_part_that_is_computed_does_not_change_the_sums(
    impl: str, new: int, dtype: torch.dtype
) -> None:
    """So a prompt gets the same bits, whichever part of it comes from the pool."""
    if impl != "cpu":
        pytest.skip("the order of PyTorch's sums depends on the number of queries")
    rule = AttentionRule(0.3, 4.0)
    q, k, v = (torch.randn(300, heads, 24).to(dtype) for heads in (6, 2, 2))
    out, lse = chunk_attention(q, k, v, causal=True, rule=rule, impl=impl)
    part = chunk_attention(q[-new:], k, v, causal=True, rule=rule, first_key=new - 300, impl=impl)
    assert torch.equal(part[0], out[-new:]) and torch.equal(part[1], lse[-new:])


def test_tiles_of_a_window_merge_to_the_whole(impl: str) -> None:
    """As a prefill does: over its chunk and the prefix's tiles, by log-sum-exp."""
    rule = AttentionRule(0.3, 4.0, 40)
    q, k, v = torch.randn(30, 4, 16), torch.randn(90, 2, 16), torch.randn(90, 2, 16)
    tiles = [(at, k[at : at + 20], v[at : at + 20]) for at in (0, 20, 40)]
    parts = [
        chunk_attention(q, *tile, causal=False, rule=rule, first_key=at - 60, impl=impl)
        for at, *tile in tiles
    ]
    parts.append(chunk_attention(q, k[60:], v[60:], causal=True, rule=rule, impl=impl))
    outs, lses = (torch.stack(each).double() for each in zip(*parts, strict=True))
    weights = lses.softmax(0)[..., None]
    seen = torch.cat([visible(30, 60, False, 40, -60), visible(30, 30, True, 40, 0)], 1)
    want_out, want_lse = attend(q, k, v, rule, seen)
    assert_close((outs * weights).sum(0), want_out, rtol=1e-4, atol=2e-5)
    assert_close(lses.logsumexp(0), want_lse, rtol=1e-5, atol=2e-5)


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
