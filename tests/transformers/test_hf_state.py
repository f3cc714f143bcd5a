"""Algorithms' state of a request under forks, crops and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.errors import ConfigError
from hisparse.transformers import HiSparseCache, disable, enable
from tests.transformers.hf_models import continuation, left_padded, model, prompt

SIZES = {"max_batch_size": 4, "max_length": 900}
SNAPKV = {"algorithm": "snapkv", "budget": 96, "algorithm_config": {"window": 20}}
FINE = {
    "algorithm": "dipr",
    "budget": 96,
    "device_buffer_size": 256,
    "algorithm_config": {"index": "fine", "capacity_threshold": 8},
}
ECONOMY = {"budget": 80, "algorithm_config": {"economy": True}}
SETTINGS = pytest.mark.parametrize(
    "settings", [SNAPKV, FINE, ECONOMY], ids=["snapkv", "fine", "economy"]
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


@SETTINGS
def test_a_file_of_the_same_settings_goes_on_alike(
    net: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    cache = read(net, prompt(600, 8), settings)
    cache.save(tmp_path / "context")
    loaded = HiSparseCache.load(tmp_path / "context", net, settings, **SIZES)
    assert steps(net, loaded, 5) == steps(net, cache, 5)


def test_a_file_without_the_tail_estimate_can_be_read_with_it(net: Any, tmp_path: Path) -> None:
    ids, quest = prompt(600, 9), {"algorithm": "quest", "budget": 96}
    read(net, ids, quest).save(tmp_path / "context")
    with_tail = quest | {"tail_estimate": True}
    loaded = HiSparseCache.load(tmp_path / "context", net, with_tail, **SIZES)
    next_id = prompt(1, 10)
    assert continuation(net, torch.cat([ids, next_id], 1), 8, loaded) == continuation(
        net, torch.cat([ids, next_id], 1), 8, read(net, ids, with_tail)
    )


@pytest.mark.parametrize("saved", [{"algorithm": "quest", "budget": 96}, SNAPKV | {"budget": 128}])
def test_a_file_without_votes_needs_the_prompts_last_queries(
    net: Any, saved: dict[str, Any], tmp_path: Path
) -> None:
    read(net, prompt(300, 11), saved).save(tmp_path / "context")
    with pytest.raises(ConfigError, match="needs the prompt's last queries") as caught:
        HiSparseCache.load(tmp_path / "context", net, SNAPKV, **SIZES)
    assert "\n" not in str(caught.value)
    # One remaining column would be a decode step.
    with pytest.raises(ConfigError, match=r"expected columns up to 280, and a forward of the rest"):
        HiSparseCache.load(tmp_path / "context", net, SNAPKV, columns=299, **SIZES)


def test_a_row_without_columns_yet(net: Any, tmp_path: Path) -> None:
    ids, mask = left_padded((200, 77), seed=12)
    options = {"attention_mask": mask, "past_key_values": HiSparseCache(net, SNAPKV, **SIZES)}
    with torch.no_grad():
        net(ids, **options)
    options["past_key_values"].save(tmp_path / "context")
    loaded = HiSparseCache.load(tmp_path / "context", net, SNAPKV, columns=100, **SIZES)
    assert loaded.row_lengths == (100, 0)
    fresh = HiSparseCache(net, SNAPKV, **SIZES)
    assert continuation(net, ids, 6, loaded, attention_mask=mask) == continuation(
        net, ids, 6, fresh, attention_mask=mask
    )


@pytest.mark.parametrize("settings", [SNAPKV, FINE], ids=["snapkv", "fine"])
def test_a_part_of_another_algorithms_file_and_the_prompts_last_tokens(
    net: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    ids = prompt(600, 11)
    read(net, ids, {"algorithm": "quest", "budget": 96}).save(tmp_path / "context")
    loaded = HiSparseCache.load(tmp_path / "context", net, settings, columns=580, **SIZES)
    with torch.no_grad():
        net(ids[:, loaded.get_seq_length() :], past_key_values=loaded)
    assert steps(net, loaded, 5) == steps(net, read(net, ids, settings), 5)
