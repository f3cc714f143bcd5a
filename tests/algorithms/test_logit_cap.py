"""Algorithms that estimate attention weights cap the logits as attention does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms import DecodeStep, PrefillStep
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.snapkv import SnapKV
from hisparse.eval.selection_stats import _exact_attention
from hisparse.kernels import cap_logits
from hisparse.testing import Request, Simulator
from hisparse.types import Selection

CAP = 2.0
#: Logits of random keys are then about as large as the cap.
SCALE = 0.6
CAPPED = {"scale": SCALE, "logit_cap": CAP}


def exact_logits(sim: Simulator, request: Request, layer: int, queries: Tensor) -> Tensor:
    """Capped logits ``[n, Hq, tokens]`` of a request's tokens in float64."""
    keys = request.k[layer, : request.done].double()
    keys = keys.repeat_interleave(sim.spec.group_size, dim=1)
    logits = torch.einsum("nhd,khd->nhk", queries.double(), keys) * SCALE
    return CAP * (logits / CAP).tanh()


def play(sim: Simulator, look: Any) -> Request:
    """Decode six steps of one request, and look at every selection."""
    request = sim.request(1, 140, seed=1)
    sim.prefill((request, 100))
    seen = []

    def observe(layer_id: int, queries: Tensor, step: DecodeStep, _: Selection) -> None:
        seen.append(layer_id)
        look(layer_id, queries, step, request)

    sim.coordinator.observe(observe)
    for _ in range(6):
        sim.decode(request)
    assert seen
    return request


def test_attention_mass_is_that_of_capped_logits() -> None:
    sim = Simulator(**CAPPED)

    def look(layer_id: int, queries: Tensor, step: DecodeStep, request: Request) -> None:
        pages, tail = _exact_attention(layer_id, queries, step)
        request = replace(request, done=int(step.seq_lens))
        weights = exact_logits(sim, request, layer_id, queries).softmax(-1)
        full = int(step.num_pages) * sim.page_size
        by_page = weights[..., :full].unflatten(-1, (-1, sim.page_size)).sum(-1)
        assert_close(pages[..., : int(step.num_pages)].double(), by_page, rtol=1e-4, atol=1e-6)
        assert_close(tail.double(), weights[..., full:].sum(-1), rtol=1e-4, atol=1e-6)

    play(sim, look)


def test_scores_of_pages_of_one_token_are_capped_logits() -> None:
    algorithm = Oracle()
    sim = Simulator(algorithm=algorithm, **CAPPED, page_size=1, host_pages=600)

    def look(layer_id: int, queries: Tensor, step: DecodeStep, request: Request) -> None:
        plain = replace(step, policy=replace(step.policy, logit_cap=0.0))
        expected = cap_logits(algorithm.score_pages(queries, layer_id, plain), CAP)
        assert expected.abs().amax() > CAP / 2
        got = algorithm.score_pages(queries, layer_id, step)
        full = int(step.num_pages)
        assert_close(got[..., :full], expected[..., :full], rtol=1e-5, atol=1e-5)

    play(sim, look)


def test_the_prompt_s_last_queries_vote_with_capped_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, votes = SnapKV._votes, {}

    def watched(
        self: SnapKV, window: Tensor, seen: Tensor, layer_id: int, step: PrefillStep
    ) -> Tensor:
        votes[layer_id] = original(self, window, seen, layer_id, step)
        return votes[layer_id]

    monkeypatch.setattr(SnapKV, "_votes", watched)
    algorithm = SnapKV(window=4)
    sim = Simulator(algorithm=algorithm, **CAPPED, scope="query_head")
    request = sim.request(1, 96, seed=1)
    sim.prefill((request, 96))
    assert set(votes) == set(range(sim.layers))
    position = torch.arange(96)
    for layer, found in votes.items():
        logits = exact_logits(sim, request, layer, request.q[layer, -4:])
        hidden = position > position[-4:, None]
        weights = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        expected = weights.unflatten(-1, (-1, sim.page_size)).sum(-1).sum(0)
        assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
