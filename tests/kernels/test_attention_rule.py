"""Logit caps and sliding windows of every implementation against dense attention in float64."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hisparse.errors import HiSparseError, KernelError
from hisparse.kernels import QUANTIZED, chunk_attention, key_score, paged_attention, quantize
from hisparse.kernels.quantize.reference import read_scales
from hisparse.types import AttentionRule, PagedKV
from tests.sizes import sized

#: Triton's interpreter takes a second for what a kernel does in a microsecond.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = sized(4, 40) if INTERPRETED else sized(30, 400)
CAPS = [0.0, 5.0] if INTERPRETED else [0.0, 0.5, 5.0, 50.0]
DECODE_WINDOWS = [0, 1, 17] if INTERPRETED else [0, 1, 15, 16, 17, 40, 1000]
LONG_WINDOWS = [100] if INTERPRETED else [1, 100, 2049, 4096, 9000]
PREFILL_WINDOWS = [1, 32] if INTERPRETED else [1, 2, 31, 32, 33, 127, 200, 5000]


def attend(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """``q [T, Hq, Dk]``, ``k, v [Tk, Hkv, D]``, ``visible [T, Tk]`` in float64: out and lse."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q.double(), k) * rule.scale
    if rule.logit_cap:
        logits = rule.logit_cap * (logits / rule.logit_cap).tanh()
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hts,shd->thd", weights, v), lse.T


def paged_case(
    rule: AttentionRule, lens: list[int], heads: int, size: int, dims: tuple[int, int]
) -> tuple[PagedKV, Tensor, Tensor]:
    """Pages, page table and lengths. What is not to be read is NaN, or the page -1."""
    width = max(-(-n // size) for n in lens) + 1
    total = len(lens) * width + 1
    # As the device buffer lies in memory: a token's heads side by side.
    k, v = (torch.randn(total, size, heads, d).transpose(1, 2) for d in dims)
    table = torch.randperm(total)[: len(lens) * width].view(len(lens), width).int()
    unread = torch.ones(total, size, dtype=torch.bool)
    for row, n in enumerate(lens):
        oldest = max(0, n - rule.window) if rule.window else 0
        for token in range(oldest, n):
            unread[table[row, token // size], token % size] = False
        table[row, : oldest // size] = -1
        table[row, -(-n // size) :] = -1
    for pages in (k, v):
        pages.masked_fill_(unread[:, None, :, None], torch.nan)
    return PagedKV(k, v), table, torch.tensor(lens, dtype=torch.int32)


def check_paged(
    q: Tensor,
    kv: PagedKV,
    table: Tensor,
    lens: Tensor,
    rule: AttentionRule,
    got: tuple[Tensor, ...],
) -> None:
    """Each row over the tokens that its window leaves."""
    for row, n in enumerate(lens.tolist()):
        oldest = max(0, n - rule.window) if rule.window else 0
        keys, values = (
            x[table[row].clamp(min=0).long()].transpose(1, 2).flatten(0, 1)[oldest:n] for x in kv
        )
        seen = torch.ones(1, n - oldest, dtype=torch.bool)
        out, lse = attend(q[row : row + 1], keys, values, rule, seen)
        assert_close(got[0][row].double(), out[0], rtol=1e-4, atol=2e-5)
        assert_close(got[1][row].double(), lse[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", DECODE_WINDOWS)
@pytest.mark.parametrize(
    ("queries", "heads", "size", "dims"),
    [
        pytest.param(3, 1, 16, (32, 32), id="per-head"),
        pytest.param(8, 2, 16, (24, 40), id="all-heads-odd-widths"),
        pytest.param(5, 1, 1, (7, 3), id="token-pages"),
    ],
)
def test_decode_attends_the_last_tokens_of_a_row(
    impl: str,
    cap: float,
    window: int,
    queries: int,
    heads: int,
    size: int,
    dims: tuple[int, int],
) -> None:
    """Windows of a token, about a page, within two pages, and larger than any context."""
    rule = AttentionRule(0.9, cap, window)
    lens = [0, 1, 16, 33, 47, 70]
    kv, table, seq_lens = paged_case(rule, lens, heads, size, dims)
    q = torch.randn(len(lens), queries, dims[0])
    got = paged_attention(q, kv, table, seq_lens, rule=rule, impl=impl)
    check_paged(q, kv, table, seq_lens, rule, got)


@pytest.mark.parametrize("window", LONG_WINDOWS)
def test_a_window_of_a_long_row(impl: str, window: int) -> None:
    """Tables of more than one split, some of which a window leaves nothing of."""
    rule = AttentionRule(0.3, 5.0, window)
    kv, table, lens = paged_case(rule, [5000, 4096, 20], 1, 16, (16, 16))
    q = torch.randn(3, 4, 16)
    got = paged_attention(q, kv, table, lens, rule=rule, impl=impl)
    check_paged(q, kv, table, lens, rule, got)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("rule", [AttentionRule(0.1, 2.0), AttentionRule(0.1, 0.0, 17)], ids=str)
def test_pages_with_scales(impl: str, rule: AttentionRule, dtype: torch.dtype) -> None:
    """The scales of keys belong to the logits that are capped."""
    kv, table, lens = paged_case(AttentionRule(1.0), [0, 40, 33, 17], 2, 8, (24, 16))
    kv = PagedKV(*(x.nan_to_num() * 9 for x in kv))
    stored = quantize(*kv, dtype)
    assert stored.scales is not None
    scales = read_scales(stored.scales)
    read = PagedKV(stored.k.float() * scales[..., :1], stored.v.float() * scales[..., 1:])
    q = torch.randn(4, 6, 24)
    got = paged_attention(q, stored, table, lens, rule=rule, impl=impl)
    check_paged(q, read, table, lens, rule, got)


@pytest.mark.parametrize("rule", [AttentionRule(0.1, 2.0), AttentionRule(0.1, 0.0, 17)], ids=str)
def test_latents(impl: str, rule: AttentionRule) -> None:
    kv, table, lens = paged_case(AttentionRule(1.0), [0, 40, 33], 1, 16, (40, 8))
    latent = kv.k.nan_to_num()
    shared = PagedKV(latent, latent[..., :32])
    q = torch.randn(3, 20, 40)
    got = paged_attention(q, shared, table, lens, rule=rule, impl=impl)
    check_paged(q, shared, table, lens, rule, got)


def visible(tokens: int, keys: int, causal: bool, window: int, first_key: int) -> Tensor:
    """``[T, Tk] bool``, from the definition."""
    query, key = torch.arange(tokens)[:, None], first_key + torch.arange(keys)
    seen = key <= query if causal else torch.ones(tokens, keys, dtype=torch.bool)
    return seen & (key > query - window) if window else seen


def check_chunk(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, causal: bool, first_key: int, impl: str
) -> None:
    out, lse = chunk_attention(q, k, v, causal=causal, rule=rule, first_key=first_key, impl=impl)
    seen = visible(len(q), len(k), causal, rule.window, first_key)
    want_out, want_lse = attend(q, k, v, rule, seen)
    assert_close(out.double(), want_out, rtol=1e-4, atol=2e-5)
    assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", PREFILL_WINDOWS)
@pytest.mark.parametrize("first_key", [0, -1, -32, -150, -4000], ids=lambda x: f"key{x}")
def test_prefill_attends_within_the_window(
    impl: str, cap: float, window: int, first_key: int
) -> None:
    """A chunk of 140 tokens over itself, and over a tile of its prefix, near, far, or before all
    windows: then rows are empty."""
    torch.manual_seed(window)
    tokens = 35 if INTERPRETED else 140
    q, keys = torch.randn(tokens, 4, 24), tokens if first_key == 0 else min(-first_key, 150)
    k, v = torch.randn(keys, 2, 24), torch.randn(keys, 2, 16)
    check_chunk(q, k, v, AttentionRule(0.5, cap, window), first_key == 0, first_key, impl)


@pytest.mark.sweeps
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tokens=st.integers(1, 60 if INTERPRETED else 400),
    keys=st.integers(1, 60 if INTERPRETED else 400),
    before=st.integers(0, 300),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cap=st.sampled_from(CAPS),
    window=st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 700)),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_ragged_prefill(
    impl: str,
    tokens: int,
    keys: int,
    before: int,
    heads: int,
    group: int,
    widths: tuple[int, int],
    cap: float,
    window: int,
    causal: bool,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    first_key = -before if causal else -keys - before
    keys = tokens + before if causal else keys
    q = torch.randn(tokens, heads * group, widths[0], generator=rng)
    k, v = (torch.randn(keys, heads, width, generator=rng) for width in widths)
    check_chunk(q, k, v, AttentionRule(0.4, cap, window), causal, first_key, impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    parts = [
        chunk_attention(
            q,
            k[at : at + 20],
            v[at : at + 20],
            causal=False,
            rule=rule,
            first_key=at - 60,
            impl=impl,
        )
        for at in (0, 20, 40)
    ]
    parts.append(chunk_attention(q, k[60:], v[60:], causal=True, rule=rule, impl=impl))
    outs, lses = (torch.stack(each).double() for each in zip(*parts, strict=True))
    weights = lses.softmax(0)[..., None]
    seen = torch.cat([visible(30, 60, False, 40, -60), visible(30, 30, True, 40, 0)], 1)
    want_out, want_lse = attend(q, k, v, rule, seen)
    assert_close((outs * weights).sum(0), want_out, rtol=1e-4, atol=2e-5)
    assert_close(lses.logsumexp(0), want_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("cap", [1.0, 30.0, 1e4])
def test_a_cap_holds_for_logits_of_every_size(impl: str, cap: float) -> None:
    """From 1e-6 to 1e6, of both signs: the log-sum-exp of one token is its logit."""
    size = torch.logspace(-6, 6, 13 if INTERPRETED else 97)
    logits = torch.cat([-size, torch.zeros(1), size])
    rows = torch.arange(len(logits), dtype=torch.int32)
    kv = PagedKV(torch.ones(len(rows), 1, 1, 1), torch.ones(len(rows), 1, 1, 1))
    out, lse = paged_attention(
        logits[:, None, None],
        kv,
        rows[:, None],
        torch.ones_like(rows),
        rule=AttentionRule(1.0, cap),
        impl=impl,
    )
    expected = cap * (logits.double() / cap).tanh()
    assert_close(lse[:, 0].double(), expected, rtol=1e-6, atol=3e-7 * cap)
    assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("reduce", ["max", "lse"])
@pytest.mark.parametrize("exact", ["reference", "cpu"])
def test_exact_page_scores_are_capped_too(exact: str, reduce: str) -> None:
    """``key_score`` is of CPUs alone."""
    query, keys = torch.randn(2, 6, 16), torch.randn(9, 2, 5, 16)
    table = torch.randint(9, (2, 7), dtype=torch.int32)
    num_pages = torch.tensor([7, 3], dtype=torch.int32)
    scores = key_score(
        query,
        keys,
        table,
        num_pages,
        reduce=reduce,
        logit_cap=3.0,
        impl=exact,  # type: ignore[arg-type]
    )
    own = keys[table.long()].double().repeat_interleave(3, dim=2)  # [B, P, Hq, S, D]
    logits = 3 * (torch.einsum("bhd,bphsd->bhps", query.double(), own) / 3).tanh()
    expected = logits.amax(-1) if reduce == "max" else logits.logsumexp(-1)
    expected[1, :, 3:] = -torch.inf
    assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_rule_that_cannot_be_is_refused() -> None:
    with pytest.raises(HiSparseError, match=r"got logit_cap -1.0, expected 0 \(none\) or more"):
        AttentionRule(1.0, -1.0)
    with pytest.raises(HiSparseError, match=r"got window -1, expected 0 \(none\) or more"):
        AttentionRule(1.0, 0.0, -1)
    tokens = torch.zeros(3, 1, 8)
    with pytest.raises(KernelError, match="k: got .* and of 3 tokens before them"):
        chunk_attention(tokens, tokens, tokens, causal=True, first_key=-3)
