"""Statistics of the selections on a tiny model, against exact attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from hisparse.eval.selection_stats import BUFFERS, SelectionStats
from hisparse.transformers import HiSparseCache, disable, enable
from tests.transformers.hf_models import model, prompt

LENGTH, STEPS = 300, 12


@pytest.fixture(scope="module")
def net() -> Any:
    made = model("llama")
    enable(made, {"algorithm": "streaming", "budget": 128}, max_length=512)
    yield made
    disable(made)


@torch.no_grad()
def stats_of(net: Any, **settings: Any) -> dict[str, Any]:
    budget = settings["budget"] // 16
    cache = HiSparseCache(net, settings, max_batch_size=2, max_length=512)
    stats = SelectionStats(budget)
    net(prompt(LENGTH, 7).expand(2, -1), past_key_values=cache, logits_to_keep=1)
    cache.coordinator.observe(stats)
    for step in range(STEPS):
        net(prompt(2, step).T, past_key_values=cache)
    return stats.summary()


def test_mass_recall_and_hits(net: Any) -> None:
    oracle = stats_of(net, algorithm="oracle", budget=128)
    streaming = stats_of(net, algorithm="streaming", budget=128)
    assert 1 >= oracle["mass"] > streaming["mass"] > 0
    # Sinks and recents are kept whether or not they are among the best.
    assert oracle["oracle_recall"] > 0.7 > streaming["oracle_recall"]
    assert streaming["adjacent_overlap"] > 0.9
    for found in (oracle, streaming):
        assert 112 < found["kept_mean"] <= found["kept_p95"] <= 128
        assert found["capped"] == 1
        hits = list(found["hit_ratio"].values())
        assert list(found["hit_ratio"]) == [f"{size:g}x" for size in BUFFERS]
        assert hits == sorted(hits), "a larger buffer never hits less"
        assert hits[0] >= found["adjacent_overlap"] - 1e-6
    assert oracle["hit_ratio"]["8x"] > oracle["hit_ratio"]["1x"] + 0.01, "pages come back"


@torch.no_grad()
def test_overlap_is_that_of_every_third_layer(net: Any) -> None:
    settings = {"algorithm": "oracle", "budget": 128}
    found, chosen = stats_of(net, **settings), dict[int, list[list[set[int]]]]()

    def look(layer_id: int, queries: Any, step: Any, selection: Any) -> None:
        sets = [set(row[row >= 0].tolist()) for row in selection.pages.flatten(0, 1)]
        chosen.setdefault(layer_id, []).append(sets)

    cache = HiSparseCache(net, settings, max_batch_size=2, max_length=512)
    net(prompt(LENGTH, 7).expand(2, -1), past_key_values=cache, logits_to_keep=1)
    cache.coordinator.observe(look)
    for step in range(STEPS):
        net(prompt(2, step).T, past_key_values=cache)
    shared = {
        layer: [
            len(now & before) / len(now)
            for a, b in pairwise(steps)
            for before, now in zip(a, b, strict=True)
        ]
        for layer, steps in chosen.items()
    }
    followed = [share for layer in range(0, len(shared), 3) for share in shared[layer]]
    assert found["adjacent_overlap"] == pytest.approx(sum(followed) / len(followed))
    assert len(shared) > 1, "of one layer alone this would say nothing"


def test_tokens_kept_are_told_by_layer_and_head(net: Any) -> None:
    layers, heads = net.config.num_hidden_layers, net.config.num_attention_heads
    found = stats_of(net, algorithm="topp", budget=128, algorithm_config={"mass": 0.6})
    kept = found["kept_by_head"]
    assert len(kept) == layers
    assert {len(row) for row in kept} == {net.config.num_key_value_heads}
    flat = [value for row in kept for value in row]
    assert sum(flat) / len(flat) == pytest.approx(found["kept_mean"], rel=1e-4)
    assert len(set(flat)) > 1, "the number of pages varies"
    by_query = stats_of(net, algorithm="oracle", budget=128, selection_scope="query_head")
    assert by_query["selection_scope"] == "query_head"
    assert {len(row) for row in by_query["kept_by_head"]} == {heads}


@pytest.mark.parametrize("settings", [{"dense_layers": [1]}, {"reuse_layers": 2}], ids=str)
def test_a_layer_without_a_selection_of_its_own_has_none(net: Any, settings: Any) -> None:
    kept = stats_of(net, algorithm="oracle", budget=128, **settings)["kept_by_head"]
    assert kept[1] is None
    assert kept[0] is not None


def test_a_context_within_the_budget_is_not_selected_from(net: Any) -> None:
    assert stats_of(net, algorithm="oracle", budget=512) == {}
