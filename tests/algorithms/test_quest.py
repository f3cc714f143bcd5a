"""Quest's bound, and the choice of pages that follows from it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from hisparse.algorithms.quest import Quest
from hisparse.testing import Simulator


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 2, 3, 4]),
)
def test_score_bounds_every_key_of_the_page(seed: int, dtype: torch.dtype, ranges: int) -> None:
    rng, quest = torch.Generator().manual_seed(seed), Quest(ranges=ranges)
    keys = torch.randn(6, 6, 2, 8, generator=rng).to(dtype)
    mask = torch.rand(6, 6, generator=rng) > 0.5
    mask[:, 0] = True
    query = torch.randn(3, 4, 8, generator=rng)
    summaries = quest.summarize(keys, mask).float()
    assert summaries.shape == (6, math.gcd(ranges, 6), 2, 16)
    bound = quest.score(query, summaries.expand(3, *summaries.shape))
    logits = torch.einsum("bghd,psgd->bghps", query.unflatten(1, (2, 2)).float(), keys.float())
    largest = logits.masked_fill(~mask, -torch.inf).amax(-1).flatten(1, 2)
    assert (bound >= largest - 1e-4).all()


def test_score_is_the_papers_sum_of_channel_maxima() -> None:
    quest, keys, query = Quest(ranges=1), torch.randn(3, 4, 2, 8), torch.randn(1, 4, 8)
    high, low = keys.amax(1), keys.amin(1)
    per_head = query[0].unflatten(0, (2, 2))[:, :, None]
    products = torch.maximum(
        per_head * high.transpose(0, 1)[:, None], per_head * low.transpose(0, 1)[:, None]
    )
    expected = products.sum(-1).flatten(0, 1)[None]
    summaries = quest.summarize(keys, torch.ones(3, 4, dtype=torch.bool))[None]
    assert_close(quest.score(query, summaries), expected)


def test_more_ranges_bound_closer_and_one_of_a_token_is_exact() -> None:
    keys, query, whole = torch.randn(9, 8, 1, 16), torch.randn(1, 1, 16), torch.ones(9, 8) > 0
    bounds = {
        ranges: (quest := Quest(ranges=ranges)).score(query, quest.summarize(keys, whole)[None])
        for ranges in (1, 2, 4, 8)
    }
    for few, many in ((1, 2), (2, 4), (4, 8)):
        assert (bounds[many] <= bounds[few] + 1e-5).all()
        assert (bounds[many] < bounds[few] - 1e-3).any()
    exact = torch.einsum("d,psd->ps", query[0, 0], keys[:, :, 0]).amax(-1)
    assert_close(bounds[8][0, 0], exact)


def test_no_ranges() -> None:
    with pytest.raises(ValueError, match="ranges: got 0, expected at least 1"):
        Quest(ranges=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("seed", range(5), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize("ranges", [1, 2, 4])
def test_what_is_stored_bounds_every_key_of_the_page(dtype: str, ranges: int, seed: int) -> None:
    """Through the coordinator: pages of prefill and of decoding, keys from 0.001 to 1,000."""
    sim = Simulator(algorithm=Quest(summary_dtype=dtype, ranges=ranges), scope="query_head")
    request = sim.request(1, 120, seed=seed)
    request.k *= torch.logspace(-3, 3, 16)
    sim.prefill((request, 61))
    scored = []
    for _ in range(40):
        sim.decode(request)
    step = sim.coordinator._step
    assert step is not None
    for layer in range(2):
        query = torch.randn(1, 4, 16) * torch.logspace(2, -3, 16)
        bound = sim.algorithm.score_pages(query, layer, step)[0]
        keys = request.k[layer, : 12 * 8].double().repeat_interleave(2, dim=1)
        logits = torch.einsum("hd,khd->hk", query[0].double(), keys).unflatten(1, (12, 8))
        # Scores are sums in float32: what they may fall short by is its rounding.
        size = torch.einsum("hd,khd->hk", query[0].double().abs(), keys.abs()).amax(-1)
        assert (bound + 1e-5 * size[:, None] >= logits.amax(-1)).all()
        scored.append((bound - logits.amax(-1)) / size[:, None])
    # A bound, but no wild one: of channels whose ranges have either sign.
    assert torch.cat(scored).mean() < 2
