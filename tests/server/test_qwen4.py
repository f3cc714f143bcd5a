"""Qwen4-Exp, whose indexer scores blocks of four tokens, against transformers.

Its other layers run with the stand-ins of ``scripts/torch_kernels.py``, in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import eq
from pathlib import Path
from typing import Any

import hybrids
import pytest
import torch
from checks import assert_nothing_held, counting
from harness import Server
from hugging_face import behind_the_best, greedy, load
from parts import MORE
from planned_bytes import assert_planned
from settings import CHECKED, QSA, TWO_RANKS
from tiny_models import CONTEXT, QSA_BUDGET, tiny_model
from workload import tokens

pytestmark = MORE

NEW_TOKENS = 24
_SHARED = tokens(4 * QSA_BUDGET, seed=60)
#: Four to eight times the budget; two of them share a prefix.
PROMPTS = [
    *(tokens(n, seed=n) for n in (257, 301, 346, 391, 440, 488)),
    *(_SHARED + tokens(n, seed=n) for n in (31, 90)),
]
#: Every tenth forward sends running requests back to the queue.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
#: SGLang's own backend.
OWN: dict[str, Any] = {"config": None, "backend": "torch_native"}
RANKS = ("--tp-size", "2", "--max-total-tokens", "20000")
FLAGS = ("--chunked-prefill-size", "128", "--max-running-requests", "4", *hybrids.FLAGS)


def serve(
    log_dir: Path, name: str, *flags: str, env: dict[str, str] | None = None, **options: Any
) -> Server:
    return Server(
        tiny_model("qwen4_exp"),
        log_dir / f"qsa-{name}.log",
        *(*FLAGS, *flags),
        **({"config": CHECKED | QSA} | options),
        env=hybrids.ENV | (env or {}),
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
    planned = {"context": CONTEXT, "max_requests": 4}
    assert_planned(server, tiny_model("qwen4_exp"), CHECKED | QSA, **planned)


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


def test_retracted_requests_get_their_tokens(log_dir: Path, expected: list[list[int]]) -> None:
    """What a request had generated is computed again as a prompt, with the same selections."""
    with serve(log_dir, "retracted", "--max-total-tokens", "20000", env=RETRACT) as server:
        together = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [answer.ids for answer in together] == expected
        assert sum(answer.retractions for answer in together) > 0
        assert_nothing_held(server)


def test_two_ranks_give_the_tokens_of_one(log_dir: Path, expected: list[list[int]]) -> None:
    """Each with half of the heads, and with the whole indexer."""
    with serve(log_dir, "ranks", *RANKS, env=TWO_RANKS) as server:
        answers = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [answer.ids for answer in answers] == expected
        sizes = server.counted_by("tp_rank", "host_kv_bytes")
        assert len(sizes) == 2 and len(set(sizes.values())) == 1


def test_sglangs_own_backend_gives_most_tokens(log_dir: Path, expected: list[list[int]]) -> None:
    """A second oracle: SGLang's indexer, its pool and its attention, which a CPU runs in PyTorch.

    Its pool has index keys in bfloat16, so that some selections differ: five prompts were equal.
    """
    with serve(log_dir, "sglang", "--max-total-tokens", "20000", **OWN) as server:
        found = [answer.ids for answer in server.generate_many(PROMPTS, NEW_TOKENS)]
    assert sum(map(eq, found, expected)) >= 4


@pytest.mark.parametrize(
    ("flags", "env", "most"),
    [
        (("--dtype", "bfloat16"), {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}, 0.3),
        # Some selections are others.
        (("--qsa-indexer-dtype", "fp8_e4m3"), {}, 1.0),
    ],
    ids=["bfloat16", "fp8 index keys"],
)
def test_less_bits_choose_nearly_the_best_tokens(
    flags: tuple[str, ...], env: dict[str, str], most: float, log_dir: Path
) -> None:
    """Of each token the logprob, by transformers in float32, is close to that of the best one."""
    config = CHECKED | QSA | {"algorithm_config": {}}
    flags += ("--max-total-tokens", "20000")
    with serve(log_dir, flags[1], *flags, config=config, env=env) as server:
        answers = [answer.ids for answer in server.generate_many(PROMPTS, NEW_TOKENS)]
        planned = config | {"algorithm_config": {"index_dtype": "float8_e4m3fn"}}
        if not env:
            sizes = {"context": CONTEXT, "max_requests": 4}
            assert_planned(server, tiny_model("qwen4_exp"), planned, **sizes)
    net = load(tiny_model("qwen4_exp"))
    behind = torch.cat([behind_the_best(net, *x) for x in zip(PROMPTS, answers, strict=True)])
    assert int((behind == 0).sum()) >= 0.85 * len(behind) and behind.max() < most
