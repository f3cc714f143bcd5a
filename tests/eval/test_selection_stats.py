"""Statistics of the selections on a tiny model, against exact attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hisparse.eval.selection_stats import SelectionStats
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
    cache = HiSparseCache(net, settings, max_batch_size=2, max_length=512)
    stats = SelectionStats()
    net(prompt(LENGTH, 7).expand(2, -1), past_key_values=cache, logits_to_keep=1)
    cache.coordinator.observe(stats)
    for step in range(STEPS):
        net(prompt(2, step).T, past_key_values=cache)
    return stats.summary()


def test_mass_recall_and_tokens(net: Any) -> None:
    oracle = stats_of(net, algorithm="oracle", budget=128)
    streaming = stats_of(net, algorithm="streaming", budget=128)
    assert 1 >= oracle["mass"] > streaming["mass"] > 0
    # Sinks and recents are kept whether or not they are among the best.
    assert oracle["oracle_recall"] > 0.7 > streaming["oracle_recall"]
    for found in (oracle, streaming):
        assert 112 < found["kept_mean"] <= 128
    by_query = stats_of(net, algorithm="oracle", budget=128, selection_scope="query_head")
    assert by_query["selection_scope"] == "query_head"


@torch.no_grad()
def test_tokens_kept_are_those_of_all_selections(net: Any) -> None:
    settings = {"algorithm": "dipr", "budget": 128, "algorithm_config": {"alpha": 0.5}}
    tokens: list[float] = []

    def look(layer_id: int, queries: Any, step: Any, selection: Any) -> None:
        tokens.extend((selection.lengths * 16 + step.tail_lens[:, None]).flatten().tolist())

    cache = HiSparseCache(net, settings, max_batch_size=2, max_length=512)
    net(prompt(LENGTH, 7).expand(2, -1), past_key_values=cache, logits_to_keep=1)
    cache.coordinator.observe(look)
    for step in range(STEPS):
        net(prompt(2, step).T, past_key_values=cache)
    assert len(set(tokens)) > 1, "the number of pages varies"
    found = stats_of(net, **settings)["kept_mean"]
    assert found == pytest.approx(sum(tokens) / len(tokens))


def test_a_context_within_the_budget_is_not_selected_from(net: Any) -> None:
    assert stats_of(net, algorithm="oracle", budget=512) == {}
