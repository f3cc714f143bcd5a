"""`overlap` on a model: its memory and its logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparse.config import HiSparseConfig
from hisparse.engine.build import EngineSetup, resolve
from hisparse.transformers import HiSparseCache, disable, enable
from tests.shapes import LLAMA, machine
from tests.transformers.hf_models import SMALL, model, prompt

SIZES = {"max_batch_size": 4, "max_length": 900}
STREAMED = SMALL | {"reuse_layers": 2, "staging_bytes": 65536}


@pytest.fixture
def net() -> Iterator[Any]:
    made = model("llama")
    enable(made, STREAMED, **SIZES)
    yield made
    disable(made)


def open_cache(net: Any, overlap: bool) -> HiSparseCache:
    return HiSparseCache(net, STREAMED | {"overlap": overlap}, **SIZES)


def logits(net: Any, overlap: bool) -> torch.Tensor:
    """Logits of a prompt in two parts, of decode steps, and of decode steps of two forks."""
    cache = open_cache(net, overlap)
    found = []
    with torch.no_grad():
        for ids in (prompt(400, 1), prompt(300, 2), *prompt(9, 3).T[:, None]):
            found.append(net(ids, past_key_values=cache, logits_to_keep=1).logits[0])
        forks = cache.fork(2)
        for ids in prompt(20, 4).T[:, None]:
            found.append(net(ids.expand(2, 1), past_key_values=forks).logits[:, 0])
    return torch.cat(found)


def test_transfers_beside_compute_give_the_same_logits(net: Any) -> None:
    assert torch.equal(logits(net, True), logits(net, False))


INDEXED = replace(LLAMA, index_head_dim=128)


def make_llama_setup(**settings: Any) -> EngineSetup:
    config = HiSparseConfig(**settings)
    spec = replace(INDEXED, page_size=config.page_size)
    return resolve(config, spec, 128**-0.5, machine(context_length=32768))


def test_memory_is_charged() -> None:
    plain, overlapping = (make_llama_setup(overlap=x).sizing for x in (False, True))
    assert overlapping.request.staging_bytes == 2 * plain.request.staging_bytes
    assert overlapping.request.request_state_bytes == plain.request.request_state_bytes


def test_memory_that_is_taken_is_what_was_charged(net: Any) -> None:
    for overlap in (False, True):
        manager = open_cache(net, overlap).coordinator.manager
        assert manager.staging.num_bytes == (2 * 65536 if overlap else 65536)
