"""Quest's bound, and the choice of pages that follows from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from hisparse.algorithms import Quest
from hisparse.algorithms.page_score import combine_heads, select_pages
from hisparse.batch import SelectionPolicy
from hisparse.types import KVSpec

QUEST = Quest()


def policy(scope: str = "kv_head", max_pages: int = 4) -> SelectionPolicy:
    spec = KVSpec(
        num_layers=1,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        dtype=torch.float32,
        page_size=4,
    )
    return SelectionPolicy(
        kv=spec, scope=scope, max_pages=max_pages, num_sink_pages=1, num_recent_pages=1, scale=1.0
    )


def step(num_pages: list[int], **kwargs: object) -> SimpleNamespace:
    return SimpleNamespace(
        policy=policy(**kwargs), num_pages=torch.tensor(num_pages, dtype=torch.int32)
    )


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


def test_heads_vote_with_their_softmax_not_with_raw_logits() -> None:
    """Head 0 has high logits everywhere; head 1 has one peak that must win over them."""
    scores = torch.zeros(1, 4, 6)
    scores[0, 0] = torch.tensor([50.0, 50.1, 50.2, 50.0, 50.1, 50.0])
    scores[0, 1] = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0, 0.0])
    combined = combine_heads(scores, step([6]))
    assert combined[0, 0].argmax() == 3


@pytest.mark.parametrize("scope", ["layer", "kv_head", "query_head"])
def test_selection_is_padded_and_never_reaches_beyond_a_request(scope: str) -> None:
    batch = step([0, 1, 3, 9], scope=scope)
    scores = torch.randn(4, batch.policy.heads, 9)
    scores = scores.masked_fill((torch.arange(9) >= batch.num_pages[:, None])[:, None], -torch.inf)
    pages, lengths = select_pages(scores, batch)
    assert lengths[:, 0].tolist() == [0, 1, 3, 4]
    for row, count in enumerate([0, 1, 3]):
        for head in range(batch.policy.heads):
            assert pages[row, head].tolist() == [*range(count), *[-1] * (4 - count)]
    for head in range(batch.policy.heads):
        chosen = pages[3, head].tolist()
        ranked = scores[3, head, 1:8].topk(2).indices + 1
        assert chosen == sorted({0, 8, *ranked.tolist()})
