"""Algorithms' state of a request under forks, crops and stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.transformers import DB, HiSparseCache, disable, enable
from tests.transformers.hf_models import model, prompt

SIZES = {"max_batch_size": 4, "max_length": 900}
SNAPKV = {"algorithm": "snapkv", "budget": 96, "algorithm_config": {"window": 20}}
DIPR = {
    "algorithm": "dipr",
    "budget": 96,
    "device_buffer_size": 256,
}
QUEST = {"algorithm": "quest", "budget": 96}
ECONOMY = {"budget": 80, "algorithm_config": {"economy": True}}
SETTINGS = pytest.mark.parametrize(
    "settings", [SNAPKV, DIPR, ECONOMY], ids=["snapkv", "dipr", "economy"]
)


@pytest.fixture
def net() -> Any:
    made = model("llama")
    enable(made, SNAPKV, **SIZES)
    yield made
    disable(made)


def read(net: Any, ids: torch.Tensor, settings: dict[str, Any]) -> HiSparseCache:
    cache = HiSparseCache(net, settings, **SIZES)
    with torch.no_grad():
        net(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def steps(net: Any, cache: HiSparseCache, count: int) -> list[list[list[int]]]:
    """Selections of the first layer while ``count`` given tokens are read."""
    seen: list[list[list[int]]] = []
    cache.coordinator.observe(
        lambda layer, q, step, chosen: seen.append(chosen.pages[0].tolist()) if not layer else None
    )
    with torch.no_grad():
        for token in range(count):
            net(torch.tensor([[token + 2]] * len(cache._slots)), past_key_values=cache)
    return seen


@SETTINGS
def test_forks_go_on_as_their_parent(net: Any, settings: dict[str, Any]) -> None:
    ids = prompt(600, 3)
    alone = steps(net, read(net, ids, settings), 5)
    assert steps(net, read(net, ids, settings).fork(2), 5) == alone


@SETTINGS
def test_cropped_tokens_have_no_effect(net: Any, settings: dict[str, Any]) -> None:
    """A question is asked and cropped, then a second one is asked: as if only the second were."""
    ids, question = prompt(600, 4), prompt(9, 5)
    cache = read(net, ids, settings)
    with torch.no_grad():
        net(prompt(60, 6), past_key_values=cache)
        cache.crop(-60)
        net(question, past_key_values=cache)
    fresh = read(net, ids, settings)
    fresh.crop(0)
    with torch.no_grad():
        net(prompt(30, 7)[:, :1], past_key_values=fresh)
        fresh.crop(-1)
        net(question, past_key_values=fresh)
    assert steps(net, cache, 4) == steps(net, fresh, 4)


@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        (SNAPKV, SNAPKV),
        (DIPR, DIPR),
        (ECONOMY, ECONOMY),
        (QUEST, QUEST | {"tail_estimate": True}),
        (QUEST, SNAPKV),
        (QUEST, DIPR),
    ],
    ids=["snapkv", "dipr", "economy", "quest-tail", "quest-snapkv", "quest-dipr"],
)
def test_stored_pages_go_on_as_computed_ones(
    net: Any, stored: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    ids = prompt(600, 8)
    for each, most_computed in ((stored, 600), (settings, 24)):
        with DB(tmp_path, net, each, **SIZES) as db:
            session, rest = db.create_session(ids[0])
            assert len(rest) <= most_computed
            with torch.no_grad():
                net(rest[None], past_key_values=session.cache, logits_to_keep=1)
            session.store(ids[0])
    assert steps(net, session.cache, 5) == steps(net, read(net, ids, settings), 5)
