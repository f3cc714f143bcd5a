"""Quest's bound, and the choice of pages that follows from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from hisparse.algorithms import Quest
from hisparse.testing import Simulator

QUEST = Quest()


@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16]))
def test_score_bounds_every_key_of_the_page(seed: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(6, 5, 2, 8, generator=rng).to(dtype)
    mask = torch.rand(6, 5, generator=rng) > 0.3
    mask[:, 0] = True
    query = torch.randn(3, 4, 8, generator=rng)
    bound = QUEST.score(query, QUEST.summarize(keys, mask).float().expand(3, -1, -1, -1))
    logits = torch.einsum("bghd,psgd->bghps", query.unflatten(1, (2, 2)).float(), keys.float())
    largest = logits.masked_fill(~mask, -torch.inf).amax(-1).flatten(1, 2)
    assert (bound >= largest - 1e-4).all()


def test_score_is_the_papers_sum_of_channel_maxima() -> None:
    keys, query = torch.randn(3, 4, 2, 8), torch.randn(1, 4, 8)
    high, low = keys.amax(1), keys.amin(1)
    per_head = query[0].unflatten(0, (2, 2))[:, :, None]
    products = torch.maximum(
        per_head * high.transpose(0, 1)[:, None], per_head * low.transpose(0, 1)[:, None]
    )
    expected = products.sum(-1).flatten(0, 1)[None]
    summaries = QUEST.summarize(keys, torch.ones(3, 4, dtype=torch.bool))[None]
    assert_close(QUEST.score(query, summaries), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("seed", range(5), ids=lambda s: f"seed{s}")
def test_what_is_stored_bounds_every_key_of_the_page(dtype: str, seed: int) -> None:
    """Through the coordinator: pages of prefill and of decoding, keys from 0.001 to 1,000."""
    sim = Simulator(algorithm=Quest(summary_dtype=dtype), scope="query_head")
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
