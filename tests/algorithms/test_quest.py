"""Quest's bound on the logits of a page."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms import SelectionPolicy
from hisparse.algorithms.quest import Quest
from hisparse.testing import Simulator
from tests.shapes import LLAMA


def summarize(quest: Quest, keys: Tensor) -> dict[str, Tensor]:
    """Representations of pages ``keys [P, S, Hkv, D]``, by name: ``[1, P, ...]``."""
    _, size, heads, dim = keys.shape
    kv = replace(
        LLAMA, num_layers=1, num_q_heads=2 * heads, num_kv_heads=heads, head_dim=dim,
        v_head_dim=dim, dtype=keys.dtype, page_size=size,
    )  # fmt: skip
    policy = SelectionPolicy(
        kv=kv,
        scope="query_head",
        budget_pages=1,
        max_pages=1,
        num_sink_pages=0,
        num_recent_pages=0,
        scale=1.0,
    )
    stored = {
        name: torch.zeros(1, len(keys), *kind.shape, dtype=kind.dtype)
        for name, kind in quest.representations(policy).items()
    }
    pages = torch.arange(len(keys), dtype=torch.int32)
    quest.store(keys, 0, pages, SimpleNamespace(representations=stored))
    return stored


def bounds(quest: Quest, keys: Tensor, query: Tensor) -> Tensor:
    """``keys [P, S, Hkv, D]``, ``query [B, Hq, D]`` -> ``[B, Hq, P]``, as a decode step scores."""
    count, batch = len(keys), len(query)

    class Step:
        representations = summarize(quest, keys)
        policy = SimpleNamespace(scale=1.0)
        host_page_table = torch.arange(count, dtype=torch.int32).expand(batch, -1).contiguous()
        num_pages = torch.full((batch,), count, dtype=torch.int32)
        max_pages = count

    return quest.score_pages(query, 0, Step())


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)
def test_score_bounds_every_key_of_the_page(
    seed: int, dtype: torch.dtype, ranges: int, stored: str
) -> None:
    rng, quest = torch.Generator().manual_seed(seed), Quest(ranges=ranges, summary_dtype=stored)
    keys = torch.randn(6, 6, 2, 8, generator=rng).to(dtype)
    query = torch.randn(3, 4, 8, generator=rng)
    logits = torch.einsum("bghd,psgd->bghps", query.unflatten(1, (2, 2)).float(), keys.float())
    largest = logits.amax(-1).flatten(1, 2)
    assert (bounds(quest, keys, query) >= largest - 1e-4).all()


def test_score_is_the_papers_sum_of_channel_maxima() -> None:
    quest = Quest(ranges=1, summary_dtype="float32")
    keys, query = torch.randn(3, 4, 2, 8), torch.randn(1, 4, 8)
    high, low = keys.amax(1), keys.amin(1)
    per_head = query[0].unflatten(0, (2, 2))[:, :, None]
    products = torch.maximum(
        per_head * high.transpose(0, 1)[:, None], per_head * low.transpose(0, 1)[:, None]
    )
    expected = products.sum(-1).flatten(0, 1)[None]
    assert_close(bounds(quest, keys, query), expected)


def test_more_ranges_bound_closer_and_one_of_a_token_is_exact() -> None:
    keys, query = torch.randn(9, 8, 1, 16), torch.randn(1, 2, 16)
    found = {
        ranges: bounds(Quest(ranges=ranges, summary_dtype="float32"), keys, query)
        for ranges in (1, 2, 4, 8)
    }
    for few, many in ((1, 2), (2, 4), (4, 8)):
        assert (found[many] <= found[few] + 1e-5).all()
        assert (found[many] < found[few] - 1e-3).any()
    exact = torch.einsum("d,psd->ps", query[0, 0], keys[:, :, 0]).amax(-1)
    assert_close(found[8][0, 0], exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("seed", range(5), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize("ranges", [1, 2, 4])
def test_what_is_stored_bounds_every_key_of_the_page(dtype: str, ranges: int, seed: int) -> None:
    """Through the coordinator: pages of prefill and of decoding, keys from 0.001 to 1,000."""
    sim = Simulator(algorithm=Quest(summary_dtype=dtype, ranges=ranges), scope="query_head")
    request = sim.request(1, 120, seed=seed)
    request.k *= torch.logspace(-3, 3, 16)
    sim.prefill((request, 61))
    scored, steps = [], []
    sim.coordinator.observe(lambda layer, q, step, chosen: steps.append(step))
    for _ in range(40):
        sim.decode(request)
    step = steps[-1]
    for layer in range(2):
        query = torch.randn(1, 4, 16) * torch.logspace(2, -3, 16)
        bound = sim.algorithm.score_pages(query, layer, step)[0] / sim.scale
        keys = request.k[layer, : 12 * 8].double().repeat_interleave(2, dim=1)
        logits = torch.einsum("hd,khd->hk", query[0].double(), keys).unflatten(1, (12, 8))
        # Scores are sums in float32: what they may fall short by is its rounding.
        size = torch.einsum("hd,khd->hk", query[0].double().abs(), keys.abs()).amax(-1)
        assert (bound + 1e-5 * size[:, None] >= logits.amax(-1)).all()
        scored.append((bound - logits.amax(-1)) / size[:, None])
    # A bound, but no wild one: of channels whose ranges have either sign.
    assert torch.cat(scored).mean() < 2
