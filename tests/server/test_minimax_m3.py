"""MiniMax-M3, whose indexer scores blocks by the best of their keys, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_nothing_held, counting
from harness import Server
from hugging_face import behind_the_best, greedy, load
from parts import more
from planned_bytes import assert_planned
from refusing import refusal, resolve
from settings import CHECKED, MSA, MSA_FLAGS, TWO_RANKS
from tiny_models import CONTEXT, KV_HEADS, MSA_BLOCK, MSA_BUDGET, MSA_FIELDS, tiny_model
from torch import Tensor
from transformers import DynamicCache
from workload import tokens

from hisparse.cache.formats import format_of
from tests.shapes import small_spec

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

NEW_TOKENS = 24
_SHARED = tokens(4 * MSA_BUDGET, seed=60)
#: Four to eight times the budget; two of them share a prefix.
PROMPTS = [
    *(tokens(n, seed=n) for n in (257, 301, 346, 391, 440, 488)),
    *(_SHARED + tokens(n, seed=n) for n in (31, 90)),
]
FLAGS = (
    *("--chunked-prefill-size", "128", "--max-running-requests", "4"),
    *("--max-total-tokens", "20000", *MSA_FLAGS),
)
#: Every tenth forward sends running requests back to the queue.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}


def serve(log_dir: Path, name: str, *flags: str, **options: Any) -> Server:
    log, config = log_dir / f"msa-{name}.log", CHECKED | MSA
    return Server(tiny_model("minimax_m3"), log, *FLAGS, *flags, config=config, **options)


def model(**options: Any) -> Any:
    names = {r"\.index_(\w+)\.": r".indexer.\1."}
    return load(tiny_model("minimax_m3"), key_mapping=names, **options)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    net = model()
    found = [greedy(net, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert all(len(set(ids)) > 5 for ids in found), "continuations that repeat show little"
    return found


@pytest.fixture(scope="module")
def server(log_dir: Path) -> Iterator[Server]:
    with serve(log_dir, "served", env={"TORCHDYNAMO_DISABLE": "1"}) as server:
        yield server


@more
def test_tokens_are_those_of_transformers(server: Server, expected: list[list[int]]) -> None:
    """One by one, together, and with prefixes of the radix cache."""
    with counting(server, "selections", "selected_tokens", "miss_pages") as counted:
        assert [server.generate(p, NEW_TOKENS).ids for p in PROMPTS] == expected
    selections, selected, misses = counted
    heads = 2 * KV_HEADS * len(PROMPTS)
    assert selections == heads * (NEW_TOKENS - 1), "two of three layers select, for each KV head"
    lengths = [len(prompt) + step for prompt in PROMPTS for step in range(1, NEW_TOKENS)]
    # The layer without an indexer attends all tokens.
    mean = (selected - KV_HEADS * sum(lengths)) / selections
    assert MSA_BUDGET - MSA_BLOCK < mean <= MSA_BUDGET and misses > 0
    again = server.generate_many(PROMPTS, NEW_TOKENS, delay_s=0.05)
    assert [answer.ids for answer in again] == expected
    assert min(answer.cached for answer in again) >= 4 * MSA_BUDGET - MSA_BLOCK
    planned = {"context": CONTEXT, "max_requests": 4}
    assert_planned(server, tiny_model("minimax_m3"), CHECKED | MSA, **planned)


@more
def test_the_selection_matters(expected: list[list[int]]) -> None:
    dense = model(index_topk_blocks=1024)
    assert [greedy(dense, p, NEW_TOKENS) for p in PROMPTS[:3]] != expected[:3]


@more
def test_an_abort_leaves_nothing(server: Server, expected: list[list[int]]) -> None:
    server.flush_cache()
    got = server.abort_after(PROMPTS[0], num_tokens=5, max_new_tokens=1000)
    assert got[:NEW_TOKENS] == expected[0][: len(got)]
    assert server.generate(PROMPTS[1], NEW_TOKENS).ids == expected[1]
    assert_nothing_held(server)


@more
def test_retracted_requests_get_their_tokens(log_dir: Path, expected: list[list[int]]) -> None:
    """What a request had generated is computed again as a prompt, with the same selections."""
    env = RETRACT | {"TORCHDYNAMO_DISABLE": "1"}
    with serve(log_dir, "retracted", env=env, forked=False) as server:
        together = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [answer.ids for answer in together] == expected
        assert sum(answer.retractions for answer in together) > 0


@more
def test_two_ranks_give_the_tokens_of_one(log_dir: Path, expected: list[list[int]]) -> None:
    """Each with a KV head, and the head of the indexer that selects for it."""
    with serve(log_dir, "ranks", "--tp-size", "2", env=TWO_RANKS) as server:
        answers = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [answer.ids for answer in answers] == expected


def as_eight_bits(update: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """An update of a cache of transformers that keeps K and V as the server stores them."""

    def rounded(cache: Any, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        spec = small_spec(head_dim=k.shape[-1], v_head_dim=v.shape[-1], kv_cache_dtype="fp8_e4m3")
        kept = format_of(spec).as_read(*(x[0].transpose(0, 1).contiguous() for x in (k, v)))
        return update(cache, *(x.transpose(0, 1)[None] for x in kept), *args, **options)

    return rounded


@more
@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"),
        ("--pp-size", "2"),
    ],
    ids=["n-grams", "pipeline"],
)
def test_other_modes_change_no_token(
    flags: tuple[str, ...], log_dir: Path, expected: list[list[int]]
) -> None:
    with serve(log_dir, flags[1].lower(), *flags, env=TWO_RANKS) as server:
        assert [x.ids for x in server.generate_many(PROMPTS, NEW_TOKENS)] == expected


@more
def test_eight_bits_choose_nearly_the_best_tokens(
    log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each token the logprob, by transformers with such K and V, is close to the best one's."""
    with serve(log_dir, "fp8", "--kv-cache-dtype", "fp8_e4m3") as server:
        answers = [answer.ids for answer in server.generate_many(PROMPTS, NEW_TOKENS)]
        assert_planned(
            server,
            *(tiny_model("minimax_m3"), CHECKED | MSA | {"kv_cache_dtype": "fp8_e4m3"}),
            **{"context": CONTEXT, "max_requests": 4},
        )
    net = model()
    monkeypatch.setattr(DynamicCache, "update", as_eight_bits(DynamicCache.update))
    behind = torch.cat([behind_the_best(net, *x) for x in zip(PROMPTS, answers, strict=True)])
    assert behind.max() < 1e-3


def m3(**changes: Any) -> str:
    """The line of MiniMax-M3's refusal, with other fields of its indexer."""
    sparse = MSA_FIELDS["sparse_attention_config"] | changes
    fields = json.dumps(MSA_FIELDS | {"sparse_attention_config": sparse})
    flags = ("--json-model-override-args", fields)
    return refusal(*flags, model=tiny_model("minimax_m3"), config=MSA)


def test_a_model_whose_indexer_scores_blocks_for_each_kv_head() -> None:
    name, folder = "MiniMaxM3SparseForCausalLM", tiny_model("minimax_m3")
    flags = MSA_FLAGS
    assert refusal(*flags, model=folder).endswith("expected an algorithm that asks it: msa")
    message = refusal(*flags, model=folder, config=MSA | {"dense_layers": [1]})
    assert f"dense_layers: got [1], expected [0], the layers of {name} without an inde" in message
    resolve(*flags, model=folder, config=MSA)
    assert f"sparse_score_type of {name}: got lse, expected max" in m3(sparse_score_type="lse")
    assert f"sparse_num_index_heads of {name}: got 4, expected 2" in m3(sparse_num_index_heads=4)
    message = m3(sparse_disable_index_value=[0, 0, 0])
    assert f"sparse_disable_index_value of {name}: got [0, 0, 0], expected [0, 1, 1]" in message
    assert f"sparse_local_block of {name}: got 0, expected at least 1" in m3(sparse_local_block=0)
