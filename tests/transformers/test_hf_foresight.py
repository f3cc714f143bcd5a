"""``speculate`` on models of transformers: what is predicted, and what comes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.cache.counters import CacheStats
from hisparse.errors import ConfigError
from hisparse.transformers import HiSparseCache, disable, enable
from tests.transformers.hf_models import SMALL, left_padded, model, prompt

CONTEXT, STEPS = 300, 24


def read(net: Any, ids: Tensor, **settings: Any) -> tuple[Tensor, CacheStats]:
    """Logits of the last tokens, read one by one, and what the cache did."""
    cache = enable(net, SMALL | settings, max_length=ids.shape[1], max_batch_size=len(ids))
    with torch.no_grad():
        net(ids[:, :CONTEXT], past_key_values=cache)
        steps = range(CONTEXT, ids.shape[1])
        logits = [net(ids[:, t : t + 1], past_key_values=cache).logits for t in steps]
    disable(net)
    return torch.cat(logits, 1), cache.stats()


@pytest.mark.parametrize("speculate", ["step", "layer"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_corrected_always_is_as_without(kind: str, speculate: str) -> None:
    net, ids = model(kind), prompt(CONTEXT + STEPS, seed=1, batch=2)
    plain, _ = read(net, ids)
    logits, stats = read(net, ids, speculate=speculate, speculation_threshold=1.0)
    assert torch.equal(logits, plain)
    assert stats.corrected_selections == stats.speculated_selections > 0
    # What a query selects for the step after it is resident: it is attended first.
    assert (stats.prefetched_pages > 0) == (speculate == "layer")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_layers_that_add_nothing_are_predicted_exactly(kind: str) -> None:
    """Each layer gets what the one before got, so its query is the predicted one."""
    net = copy.deepcopy(model(kind))
    for layer in net.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    _, stats = read(
        net, prompt(CONTEXT + STEPS, seed=2), speculate="layer", speculation_threshold=0.99999
    )
    assert stats.corrected_selections == 0
    layers, heads = len(net.model.layers), net.config.num_key_value_heads
    assert stats.speculated_selections == (layers - 1) * heads * STEPS


def test_padded_rows_are_predicted_as_alone() -> None:
    net = model("llama")
    settings = SMALL | {"speculate": "layer", "speculation_threshold": 0.5}
    ids, mask = left_padded((CONTEXT, CONTEXT - 70), seed=3)
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": STEPS}
    cache = enable(net, settings, max_length=CONTEXT + STEPS, max_batch_size=2)
    both = net.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    alone = net.generate(
        ids[1:, 70:],
        past_key_values=HiSparseCache(net, settings, max_length=CONTEXT + STEPS),
        **options,
    )
    disable(net)
    assert both[1, CONTEXT:].tolist() == alone[0, CONTEXT - 70 :].tolist()


def test_layers_cannot_be_asked_by_a_configuration_alone() -> None:
    with pytest.raises(ConfigError, match="not only its configuration") as caught:
        HiSparseCache(model("llama").config, SMALL | {"speculate": "layer"}, max_length=CONTEXT)
    assert "\n" not in str(caught.value)


def test_a_model_is_as_it_was_afterwards() -> None:
    net = model("llama")
    enable(net, SMALL | {"speculate": "layer"}, max_length=CONTEXT)
    hooked = [bool(layer._forward_pre_hooks) for layer in net.model.layers]
    disable(net)
    assert hooked == [True] * (len(hooked) - 1) + [False]
    assert not any(layer._forward_pre_hooks for layer in net.model.layers)
