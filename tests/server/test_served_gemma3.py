"""Gemma 3 270M with real weights: windows of 512 tokens in 15 of 18 layers.

With a budget of the context, the server and ``HiSparseCache`` give the greedy tokens of
transformers after 4,096 and 8,192 tokens of a text.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from harness import Server
from hugging_face import greedy, load

from hisparse.eval.models import fetch
from hisparse.eval.texts import read_text
from hisparse.transformers import disable, enable

pytestmark = pytest.mark.modes

LENGTHS = [4096, 8192]
_NEW_TOKENS = 32
_FLAGS = ("--max-total-tokens", "20000", "--chunked-prefill-size", "2048")
_MEMORY = {"host_memory": "2GiB", "device_memory": "1500MB"}


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch("gemma3-270m")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(read_text("moby_dick")).input_ids
    return [ids[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def net(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def dense(net: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(net, prompt, _NEW_TOKENS) for prompt in prompts]


def test_a_cache_with_a_budget_of_the_context(
    net: Any, prompts: list[list[int]], dense: list[list[int]]
) -> None:
    try:
        cache = enable(net, budget=16384, max_length=8300)
        assert cache.coordinator.policy.kv.full_layers == (5, 11, 17)
        for prompt, tokens in zip(prompts, dense, strict=True):
            cache.reset()
            assert greedy(net, prompt, _NEW_TOKENS, past_key_values=cache) == tokens
    finally:
        disable(net)


def test_a_server_with_a_budget_of_the_context(
    folder: Path, prompts: list[list[int]], dense: list[list[int]], log_dir: Path
) -> None:
    config = _MEMORY | {"budget": 8448, "device_buffer_size": 8448}
    with Server(folder, log_dir / "gemma3.log", *_FLAGS, config=config) as server:
        line = "15 of 18 layers attend windows of 512 tokens"
        assert line in server.log()
        together = server.generate_many(prompts, _NEW_TOKENS)
        assert [answer.ids for answer in together] == dense
        again = server.generate(prompts[1], _NEW_TOKENS)
        assert (again.ids, again.cached) == (dense[1], LENGTHS[1] - 16)


def test_a_small_budget(folder: Path, prompts: list[list[int]], log_dir: Path) -> None:
    config = _MEMORY | {"budget": 512}
    with Server(folder, log_dir / "gemma3-small.log", *_FLAGS, config=config) as server:
        answers = server.generate_many(prompts, _NEW_TOKENS, top_logprobs=1)
        assert all(len(answer.ids) == _NEW_TOKENS for answer in answers)
        assert all(math.isfinite(x) for answer in answers for x in answer.logprobs)
        assert server.metrics()["hisparse:selections"] > 0
