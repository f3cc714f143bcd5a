"""DIPR against its definition in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.algorithms.dipr import _SKETCHES, DIPR
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_capabilities
from hisparse.errors import ConfigError
from hisparse.testing import Request, Simulator
from hisparse.testing.recorder import Recorder, Retrieved
from hisparse.types import Selection
from tests.sizes import sized

LATENTS: dict[str, Any] = {"kv_heads": 1, "head_dim": 48, "latent_rank": 32}
SCOPES = ["layer", "kv_head", "query_head"]


def flat(**options: float) -> DIPR:
    return DIPR(index="flat", **options)


def behind_best(sim: Simulator, request: Request, layer: int, tokens: int) -> Tensor:
    """``[H, P]``: a page's log-sum-exp minus the largest; maximum over the heads of a row."""
    size, count = sim.page_size, (tokens - 1) // sim.page_size
    kv_format, own = sim.manager.host.format, (layer, slice(tokens))
    k = kv_format.as_read(request.k[own], request.v[own]).k.double()
    k = k.repeat_interleave(sim.spec.group_size, dim=1)
    logits = torch.einsum("hd,khd->hk", request.q[layer, tokens - 1].double(), k) * sim.scale
    pages = logits[:, : count * size].unflatten(1, (count, size)).logsumexp(-1)
    tail = logits[:, count * size :].logsumexp(-1, keepdim=True)
    behind = pages - torch.cat([pages, tail], 1).amax(-1, keepdim=True)
    return behind.unflatten(0, (sim.policy.heads, -1)).amax(1)


def require_range(
    sim: Simulator, request: Request, seen: Retrieved, row: int, beta: float, off: float = 1e-4
) -> int:
    """Check a selection against the definition; returns how often the cap binds.

    ``off`` is what the difference of two scores may be off by.
    """
    most, capped = sim.policy.max_pages, 0
    behind = behind_best(sim, request, seen.layer_id, seen.seq_lens[row])
    count = behind.shape[1]
    forced = {0, count - 1} if count else set()
    for head, pages in enumerate(seen.pages[row]):
        chosen = set(pages[: seen.lengths[row][head]])
        assert chosen >= forced
        ranked = sorted(set(range(count)) - forced, key=lambda p: -behind[head, p].item())
        room = most - len(forced)
        sure = [p for p in ranked if behind[head, p] >= -beta + off]
        allowed = [p for p in ranked if behind[head, p] >= -beta - off]
        capped += len(sure) > room
        # If the cap binds, the best pages are kept; pages with equal scores are interchangeable.
        least = behind[head, sure[room - 1]] if len(sure) > room else -math.inf
        assert {p for p in sure[:room] if behind[head, p] > least + off} <= chosen - forced
        assert chosen - forced <= set(allowed)
        assert len(chosen) <= most
        assert len(chosen - forced) >= min(len(sure), room)
    return capped


@settings(max_examples=sized(20, 200), deadline=None)
@given(
    scope=st.sampled_from(SCOPES),
    index=st.sampled_from(["flat", "sketch"]),
    page_size=st.sampled_from([1, 16]),
    layout=st.sampled_from(["layer_first", "page_first", "page_head"]),
    alpha=st.sampled_from([0.9, 0.3, 0.05, 0.001]),
    buffer=st.sampled_from([4, 6, 20]),
    lengths=st.lists(st.integers(1, 13 * 16), min_size=1, max_size=3),
    sharpness=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 2**20),
)
def test_what_is_kept_is_what_is_in_range(
    scope: Any,
    index: Any,
    page_size: int,
    layout: Any,
    alpha: float,
    buffer: int,
    lengths: list[int],
    sharpness: float,
    seed: int,
) -> None:
    recorder = Recorder(DIPR(alpha=alpha, index=index))
    sim = Simulator(
        scope=scope,
        layout=layout,
        page_size=page_size,
        algorithm=recorder,
        budget=4 * page_size,
        device_buffer=buffer * page_size,
        max_row=buffer * page_size,
        host_pages=900,
    )
    requests = [sim.request(i + 1, n + 3, seed=seed + i) for i, n in enumerate(lengths)]
    for request, n in zip(requests, lengths, strict=True):
        request.q *= sharpness
        sim.prefill((request, n))
    for _ in range(3):
        sim.decode(*requests)
    # With a sharpness of 5, the largest error of 700 such cases was 2.4.
    off = 1e-4 if index == "flat" else 1e-4 + 0.6 * sharpness
    for seen in recorder.retrieved:
        for row, slot in enumerate(seen.slots):
            require_range(sim, requests[slot - 1], seen, row, -math.log(alpha), off)


@pytest.mark.parametrize(
    "stored",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "int8", "layout": "page_first"},
        {"scope": "layer"} | LATENTS,
        {"scope": "kv_head", "kv_cache_dtype": "fp8_e4m3"} | LATENTS,
    ],
    ids=["fp8", "int8", "mla", "mla-fp8"],
)
def test_keys_are_scored_as_they_are_stored(stored: dict[str, Any]) -> None:
    recorder = Recorder(flat(alpha=0.05))
    sim = Simulator(algorithm=recorder, **stored)
    request = sim.request(1, 203, seed=3)
    sim.prefill((request, 190))
    for _ in range(13):
        sim.decode(request)
    for seen in recorder.retrieved:
        require_range(sim, request, seen, 0, -math.log(0.05))


def retrieved(algorithm: DIPR, scope: Any = "kv_head", **changes: Any) -> list[Retrieved]:
    """Selections of ten steps of a request of 260 tokens."""
    recorder = Recorder(algorithm)
    world = {"budget": 32, "device_buffer": 128, "max_row": 128, "num_slots": 3}
    sim = Simulator(scope=scope, algorithm=recorder, **(world | changes))
    request = sim.request(1, 260, seed=4)
    sim.prefill((request, 250))
    for _ in range(10):
        sim.decode(request)
    return recorder.retrieved


def test_beta_is_in_units_of_products_before_the_scale() -> None:
    """The paper's relation: beta = -ln(alpha) * sqrt(D)."""
    scale, alpha = 16**-0.5, 0.5
    beta = -math.log(alpha) * 16**0.5
    assert math.isclose(flat(beta=beta).within(scale), flat(alpha=alpha).within(scale))
    by_alpha = retrieved(flat(alpha=alpha), scale=scale)
    assert retrieved(flat(beta=beta), scale=scale) == by_alpha
    assert retrieved(flat(beta=2 * beta), scale=scale) != by_alpha
    assert retrieved(flat(), scale=scale) == retrieved(flat(alpha=0.01), scale=scale)


@pytest.mark.parametrize("scope", SCOPES)
def test_the_number_follows_the_query_up_to_the_cap(scope: str) -> None:
    numbers = [
        {n for r in retrieved(flat(alpha=alpha), scope) for n in r.lengths[0]}
        for alpha in (0.999, 0.7, 1e-9)
    ]
    few, some, all_there_is = numbers
    # The sink, the recent page and each head's best.
    assert max(few) <= 2 + 4 // {"layer": 1, "kv_head": 2, "query_head": 4}[scope]
    assert len(some) > 2
    assert all_there_is == {128 // 8 - 1}


@pytest.mark.parametrize(("alpha", "capped"), [(1e-9, 10 * 2 * 2), (0.999, 0)])
def test_how_often_the_cap_binds_is_counted(alpha: float, capped: int) -> None:
    """10 steps, 2 layers, 2 rows."""
    sim = Simulator(algorithm=flat(alpha=alpha))
    request = sim.request(1, 200, seed=1)
    sim.prefill((request, 190))
    for _ in range(10):
        sim.decode(request)
    assert sim.coordinator.stats().capped_selections == capped


def test_of_equal_tokens_the_first_are_kept() -> None:
    recorder = Recorder(flat(beta=0.001))
    sim = Simulator(algorithm=recorder, device_buffer=64, budget=32)
    request = sim.request(1, 200, seed=1)
    request.k.fill_(1.0)
    sim.prefill((request, 190))
    sim.decode(request)
    for seen in recorder.retrieved:
        assert seen.pages[0] == [[0, 1, 2, 3, 4, 5, 22]] * 2


def test_the_tail_page_counts() -> None:
    """If a token of the tail page has by far the largest logit, no other page is in range."""
    recorder = Recorder(flat(alpha=0.001))
    sim = Simulator(algorithm=recorder)
    request = sim.request(1, 200, seed=1)
    request.k[:, 190] = 50 * request.q[:, 190].unflatten(1, (2, -1)).mean(2)
    request.q[:, 190] = request.q[:, 190].unflatten(1, (2, -1)).mean(2).repeat_interleave(2, 1)
    sim.prefill((request, 190))
    sim.decode(request)
    assert [seen.pages[0][0][:3] for seen in recorder.retrieved] == [[0, 22, -1]] * 2


class Checked(DIPR):
    """Compares what sketches give with the definition, by their own scores."""

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        found, policy = super().retrieve_topk(queries, layer_id, step), step.policy
        tail = step.tail_pages(layer_id)
        scores, rest = _SKETCHES.score(queries, layer_id, step, tail=tail)
        assert rest is not None
        exists = (torch.arange(step.max_pages) < step.num_pages[:, None])[:, None]
        best = torch.maximum(scores.masked_fill(~exists, -math.inf).amax(-1), rest)
        behind = (scores - best[..., None]).unflatten(1, (policy.heads, -1)).amax(2)
        wanted = (behind >= -self.within(policy.scale)) & exists | step.forced_pages[:, None]
        assert int(wanted.sum(-1).max()) <= policy.max_pages
        chosen = torch.zeros(*wanted.shape[:2], step.max_pages + 1, dtype=torch.bool)
        index = torch.where(found.pages < 0, step.max_pages, found.pages).long()
        assert torch.equal(chosen.scatter(2, index, True)[..., :-1], wanted)
        return found


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("shape", "alpha"), [({}, 0.7), ({"page_size": 1, "host_pages": 900}, 0.3), (LATENTS, 0.3)]
)
def test_sketches_give_the_pages_in_range(scope: Any, shape: dict[str, Any], alpha: float) -> None:
    scope = "layer" if shape is LATENTS else scope
    found = retrieved(Checked(alpha=alpha), scope, device_buffer=256, max_row=256, **shape)
    lengths = {n for seen in found for n in seen.lengths[0]}
    assert len(lengths) > 2
    assert max(lengths) < found[0].num_pages[0]


def test_only_a_cpu_reads_every_key() -> None:
    config = HiSparseConfig(algorithm="dipr", algorithm_config={"index": "flat"})
    check_capabilities(config, "cpu")
    with pytest.raises(ConfigError, match="got device cuda, expected cpu"):
        check_capabilities(config, "cuda")
    check_capabilities(HiSparseConfig(algorithm="dipr"), "cuda")
