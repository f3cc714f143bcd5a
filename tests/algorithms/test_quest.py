"""Quest's bound, and the choice of pages that follows from it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from hisparse.algorithms import Quest

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
