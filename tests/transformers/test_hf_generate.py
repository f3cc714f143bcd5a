"""``generate`` and ``forward`` of unmodified models with a HiSparseCache."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from hisparse.model_config import AS_LATENTS
from hisparse.transformers import HiSparseCache, disable, enable
from tests.sizes import sized
from tests.transformers.hf_models import (
    ROOMY,
    SMALL,
    continuation,
    each_alone,
    left_padded,
    model,
    prompt,
)

PAGE = 16


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def net(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield model(request.param)
    disable(model(request.param))


@pytest.fixture
def llama() -> Iterator[Any]:
    yield model("llama")
    disable(model("llama"))


@pytest.mark.parametrize("scope", ["layer", "kv_head", "query_head"])
def test_a_budget_that_holds_the_context_gives_the_tokens_of_plain_generate(
    net: Any, scope: str
) -> None:
    ids, mask = left_padded((333, 160, 47, 1), seed=1)
    dense = continuation(net, ids, 40, attention_mask=mask)
    cache = enable(net, ROOMY | {"selection_scope": scope}, max_batch_size=4, max_length=400)
    assert continuation(net, ids, 40, cache, attention_mask=mask) == dense
    assert len(set(dense[0])) > 10, "a continuation that repeats itself shows little"
    assert cache.row_lengths == (372, 199, 86, 40)
    assert cache.get_seq_length() == 372


def test_logits_are_those_of_dense_attention(net: Any) -> None:
    """A prompt, then single columns; a padded column in the middle of a row too."""
    ids, mask = left_padded((200, 131), seed=2)
    mask[1, 150] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        dense = net(ids, attention_mask=mask, position_ids=positions).logits
        cache = enable(net, ROOMY, max_batch_size=2, max_length=256)
        parts = []
        for start, stop in [(0, 140), (140, 160), *((n, n + 1) for n in range(160, 200))]:
            now = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            parts.append(net(ids[:, start:stop], past_key_values=cache, **now).logits)
    real = mask.bool()
    assert (torch.cat(parts, 1) - dense)[real].abs().max() < 1e-3
    assert cache.row_lengths == (200, 130)


def test_a_row_depends_on_itself_alone(llama: Any) -> None:
    """A budget far below the context: batched and padded, or alone, or in chunks."""
    lengths = (450, 333, 160, 97)
    ids, mask = left_padded(lengths, seed=3)
    cache = enable(llama, SMALL, max_batch_size=4, max_length=512)
    together = continuation(llama, ids, 50, cache, attention_mask=mask)
    assert together == each_alone(llama, cache, ids, lengths, 50)
    cache.reset()
    chunked = continuation(llama, ids, 50, cache, attention_mask=mask, prefill_chunk_size=100)
    assert together == chunked


def test_a_small_budget_attends_to_no_more_than_the_budget(llama: Any) -> None:
    ids = prompt(400, seed=4)
    cache = enable(llama, SMALL, selection_scope="layer", max_length=512)
    sparse = continuation(llama, ids, 30, cache)
    steps, layers = 29, len(cache)
    tails = sum(n % PAGE + 1 for n in range(400, 429))
    assert cache.stats().selected_tokens == layers * (steps * (SMALL["budget"] - PAGE) + tails)
    assert cache.stats().miss_pages > 0
    disable(llama)
    assert sparse != continuation(llama, ids, 30), "this budget is too small to change nothing"


@pytest.mark.sweeps
def test_pages_attended_in_host_memory_change_no_token(llama: Any) -> None:
    """In float32, where the best token leads by more than rounding."""
    lengths = sized((700, 1500), (4096, 5000, 6500, 8192, 10000, 12000, 14000, 16384))
    prompts, answers = [prompt(n, seed=n) for n in lengths], []
    config = {"budget": 256, "device_buffer_size": 256, "max_row_capacity": 256}
    for miss in ("transfer", "host"):
        cache = enable(llama, config | {"miss": miss}, max_length=max(lengths) + 40)
        answers.append([])
        for ids in prompts:
            cache.reset()
            answers[-1] += continuation(llama, ids, 40, cache)
        assert (cache.stats().away_pages > 0) == (miss == "host")
        disable(llama)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "settings",
    [{"min_sparse_context": 4096}, {"dense_layers": [0, 1, 2]}],
    ids=["contexts that are dense by length", "dense layers"],
)
def test_dense_by_configuration(llama: Any, settings: dict[str, Any]) -> None:
    ids = prompt(300, seed=5, batch=2)
    dense = continuation(llama, ids, 30)
    cache = enable(llama, SMALL | settings, max_batch_size=2, max_length=512)
    assert continuation(llama, ids, 30, cache) == dense


def test_a_conversation_goes_on_with_the_same_cache(llama: Any) -> None:
    cache = enable(llama, ROOMY, max_length=512)
    text = prompt(150, seed=6)
    for turn in range(3):
        answer = continuation(llama, text, 20, cache)
        assert cache.get_seq_length() == text.shape[1] + 19
        text = torch.cat([text, torch.tensor(answer), prompt(33, seed=7 + turn)], 1)
    last = continuation(llama, text, 20, cache)
    disable(llama)
    assert last == continuation(llama, text, 20)


def test_disable_restores_what_was_set_before() -> None:
    net = model("llama")
    before = net.config._attn_implementation
    enable(net, ROOMY, max_length=64)
    enable(net, ROOMY, max_length=64)
    assert net.config._attn_implementation == "hisparse" != before
    disable(net)
    disable(net)
    assert net.config._attn_implementation == before


def test_half_precision(llama: Any) -> None:
    """bfloat16 rounds, so logits are compared and not tokens."""
    half = type(llama)(deepcopy(llama.config)).to(torch.bfloat16).eval()
    half.load_state_dict(llama.state_dict())
    ids = prompt(130, seed=8)
    with torch.no_grad():
        dense = half(ids).logits.float()
        cache = enable(half, ROOMY, max_length=256)
        parts = [half(ids[:, :100], past_key_values=cache).logits]
        parts += [half(ids[:, n : n + 1], past_key_values=cache).logits for n in range(100, 130)]
    error = (torch.cat(parts, 1).float() - dense).abs().mean() / dense.abs().mean()
    assert error < 0.05


def test_more_caches_of_one_model(llama: Any) -> None:
    """A model attends over the cache that is passed, not over the newest cache."""
    first = enable(llama, ROOMY, max_length=300)
    second = HiSparseCache(llama, ROOMY, max_length=300)
    ids = prompt(200, seed=9, batch=2)
    dense = []
    for row, cache in zip(ids, (first, second), strict=True):
        dense.append(continuation(llama, row[None], 5, cache))
        assert cache.row_lengths == (204,)
    disable(llama)
    assert [continuation(llama, row[None], 5) for row in ids] == dense


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_latents_of_all_heads_attend_as_the_heads_do(kind: str) -> None:
    """Selections that do not depend on scores, and dense attention: the tokens are the same."""
    net, answers = model(kind), []
    ids, mask = left_padded((300, 170), seed=9)
    for latents in (False, True):
        setattr(net.config, AS_LATENTS, latents)
        try:
            for more in ({"min_sparse_context": 4096}, {"algorithm": "streaming"}):
                cache = enable(
                    net, SMALL, **more, selection_scope="layer", max_batch_size=2, max_length=512
                )
                answers.append(continuation(net, ids, 40, cache, attention_mask=mask))
        finally:
            disable(net)
            delattr(net.config, AS_LATENTS)
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]
