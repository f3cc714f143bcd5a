"""Qwen4-Exp, whose indexer scores blocks of four tokens, against transformers.

Its other layers run with the stand-ins of ``scripts/torch_kernels.py``, in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hybrids
import pytest
from checks import assert_nothing_held, counting
from harness import Server
from hugging_face import greedy, load
from parts import MORE
from settings import CHECKED, QSA
from tiny_models import QSA_BUDGET, tiny_model
from workload import tokens

pytestmark = MORE

NEW_TOKENS = 24
_SHARED = tokens(4 * QSA_BUDGET, seed=60)
#: Four to eight times the budget; two of them share a prefix.
PROMPTS = [
    *(tokens(n, seed=n) for n in (257, 301, 346, 391, 440, 488)),
    *(_SHARED + tokens(n, seed=n) for n in (31, 90)),
]
FLAGS = ("--chunked-prefill-size", "128", "--max-running-requests", "4", *hybrids.FLAGS)


def serve(log_dir: Path, name: str, *flags: str, **config: object) -> Server:
    return Server(
        tiny_model("qwen4_exp"),
        log_dir / f"qsa-{name}.log",
        *(*FLAGS, *flags),
        config=CHECKED | QSA | config,
        env=hybrids.ENV,
        python_path=hybrids.python_path(log_dir / "plugin"),
        # The stand-ins have to be there before SGLang imports the model.
        forked=False,
    )


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    net = load(tiny_model("qwen4_exp"))
    found = [greedy(net, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert all(len(set(ids)) > 5 for ids in found), "continuations that repeat show little"
    return found


@pytest.fixture(scope="module")
def server(log_dir: Path) -> Iterator[Server]:
    with serve(log_dir, "served", "--max-total-tokens", "20000") as server:
        yield server


def test_tokens_are_those_of_transformers(server: Server, expected: list[list[int]]) -> None:
    """One by one, together, and with prefixes of the radix cache."""
    with counting(server, "selections", "selected_tokens", "miss_pages") as counted:
        assert [server.generate(p, NEW_TOKENS).ids for p in PROMPTS] == expected
    selections, selected, misses = counted
    assert selections == 2 * len(PROMPTS) * (NEW_TOKENS - 1), "two layers attend"
    assert QSA_BUDGET < selected / selections < QSA_BUDGET + 4 and misses > 0
    again = server.generate_many(PROMPTS, NEW_TOKENS, delay_s=0.05)
    assert [answer.ids for answer in again] == expected
    assert min(answer.cached for answer in again) >= 4 * QSA_BUDGET - 64


def test_the_selection_matters(server: Server, expected: list[list[int]]) -> None:
    dense = load(tiny_model("qwen4_exp"))
    for layer in dense.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.indexer.block_topk = 4096
            layer.self_attn.indexer.token_budget = 16384
    assert [greedy(dense, p, NEW_TOKENS) for p in PROMPTS[:3]] != expected[:3]


def test_an_abort_leaves_nothing(server: Server, expected: list[list[int]]) -> None:
    server.flush_cache()
    got = server.abort_after(PROMPTS[0], num_tokens=5, max_new_tokens=1000)
    assert got[:NEW_TOKENS] == expected[0][: len(got)]
    assert server.generate(PROMPTS[1], NEW_TOKENS).ids == expected[1]
    assert_nothing_held(server)
