"""Models with sliding windows, capped logits and sinks, with a HiSparseCache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hisparse.errors import HiSparseError
from hisparse.transformers import DB, disable, enable
from tests.server.tiny_models import LAYERS, WINDOW
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

#: Layers of the tiny models that attend the whole context.
FULL = {
    "mistral": (),
    "phi3": (),
    "gemma2": (1,),
    "gemma3": (1,),
    "cohere2": (1,),
    "gpt_oss": (1,),
}
KINDS = sized(["mistral", "gemma2", "gemma3", "gpt_oss"], [*FULL])


@pytest.fixture(params=KINDS)
def net(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = model(request.param)
    # PyTorch's own attention, which transformers takes by default, ignores caps.
    made.set_attn_implementation("eager")
    made.kind = request.param
    yield made
    disable(made)


def test_a_budget_that_holds_the_context_gives_the_tokens_of_plain_generate(net: Any) -> None:
    ids, mask = left_padded((333, 160, 47, 1), seed=1)
    dense = continuation(net, ids, 40, attention_mask=mask)
    cache = enable(net, ROOMY, max_batch_size=4, max_length=400)
    kv = cache.coordinator.policy.kv
    assert kv.full_layers == FULL[net.kind]
    assert kv.widest_window == WINDOW
    assert continuation(net, ids, 40, cache, attention_mask=mask) == dense
    cache.reset()
    chunks = continuation(net, ids, 40, cache, attention_mask=mask, prefill_chunk_size=150)
    assert chunks == dense
    assert len(set(dense[0])) > 10, "a continuation that repeats itself shows little"


def test_the_window_matters(net: Any) -> None:
    """Without windows, caps or sinks the logits would be others."""
    ids = prompt(300, seed=2)
    with torch.no_grad():
        dense = net(ids).logits[0, -1]
        changed = net.config.sliding_window
        net.config.sliding_window = 4 * WINDOW
        try:
            wide = net(ids, past_key_values=DynamicCache()).logits[0, -1]
        finally:
            net.config.sliding_window = changed
    assert (wide - dense).abs().max() > 1e-3


def test_a_small_budget_keeps_rows_apart(net: Any) -> None:
    """Windows are wider than the device buffer of these settings, which is raised."""
    lengths = (400, 150)
    ids, mask = left_padded(lengths, seed=3)
    settings = SMALL | {"device_buffer_size": 96, "max_row_capacity": 160}
    cache = enable(net, settings, max_batch_size=2, max_length=450)
    together = continuation(net, ids, 30, cache, attention_mask=mask)
    assert together == each_alone(net, cache, ids, lengths, 30)


@pytest.fixture
def plain(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model with PyTorch's own attention."""
    yield model(request.param)
    disable(model(request.param))


@pytest.mark.parametrize("plain", ["mistral"], indirect=True)
def test_a_window_that_holds_the_context_is_none(plain: Any) -> None:
    cache = enable(plain, SMALL, max_length=WINDOW - 4)
    assert cache.coordinator.policy.kv.full_layers == tuple(range(LAYERS))
    assert continuation(plain, prompt(50, seed=4), 20, cache)


@pytest.mark.parametrize("plain", ["mistral"], indirect=True)
def test_another_window_than_the_caches_is_refused(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = enable(plain, SMALL, max_length=400)
    monkeypatch.setattr(plain.config, "sliding_window", 64)
    with pytest.raises(HiSparseError, match="layer 0: got window 64, expected 100; make the"):
        continuation(plain, prompt(50, seed=4), 2, cache)


@pytest.mark.parametrize("plain", ["gemma3"], indirect=True)
def test_stored_pages_go_on_where_they_were(plain: Any, tmp_path: Any) -> None:
    ids = prompt(300, seed=5)
    whole = continuation(plain, ids, 30, enable(plain, SMALL, max_length=400))
    for turn, settings in enumerate((SMALL, SMALL, SMALL | {"algorithm": "quest"})):
        with DB(tmp_path, plain, settings, max_length=400) as db:
            session, rest = db.create_session(ids[0])
            assert len(rest) == (12 if turn else 300)
            again = continuation(plain, ids, 30, session.cache)
            session.store(ids[0])
        assert settings is not SMALL or again == whole
        assert len(again[0]) == 30
