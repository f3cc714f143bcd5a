"""A model that SGLang runs with the code of transformers, through the real server."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import Server
from parts import MORE
from tiny_models import tiny_model
from workload import tokens

pytestmark = MORE

_NEW_TOKENS = 24
_PREFIX = tokens(400, seed=41)
PROMPTS = [tokens(90, seed=40), _PREFIX + tokens(333, seed=42), _PREFIX + tokens(20, seed=43)]
_FLAGS = (
    *("--model-impl", "transformers", "--max-total-tokens", "20000"),
    *("--chunked-prefill-size", "256"),
)
_MEMORY = {"host_memory": "1GiB", "device_memory": "300MB"}


def _of_transformers() -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(tiny_model("smollm3")).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = net.generate(ids, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_a_roomy_budget_gives_the_tokens_of_transformers(log_dir: Path) -> None:
    dense = _of_transformers()
    assert all(len(set(ids)) > 5 for ids in dense), "continuations that repeat show little"
    config = _MEMORY | {"budget": 2048}
    log = log_dir / "fallback.log"
    with Server(tiny_model("smollm3"), log, *_FLAGS, config=config) as server:
        assert [answer.ids for answer in server.generate_many(PROMPTS, _NEW_TOKENS)] == dense
        again = server.generate_many(PROMPTS, _NEW_TOKENS)
        assert [answer.ids for answer in again] == dense
        assert min(answer.cached for answer in again[1:]) >= 384


@pytest.mark.modes
def test_a_small_budget_keeps_requests_apart(log_dir: Path) -> None:
    config = _MEMORY | {"budget": 96, "checked": True}
    log = log_dir / "fallback-sparse.log"
    with Server(tiny_model("smollm3"), log, *_FLAGS, config=config) as server:
        together = server.generate_many(PROMPTS, _NEW_TOKENS, top_logprobs=1)
        server.flush_cache()
        alone = [server.generate(prompt, _NEW_TOKENS, top_logprobs=1) for prompt in PROMPTS]
        assert [x.ids for x in together] == [x.ids for x in alone]
        assert all(math.isfinite(value) for x in alone for value in x.logprobs)
