"""Models with an indexer of their own give the tokens of transformers, whatever happens to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import assert_nothing_held, counting
from harness import Server
from hugging_face import greedy
from indexers import BUDGET, KINDS, NEW_TOKENS, PROMPTS, attending_all, expected_tokens, serve
from parts import MORE
from planned_bytes import assert_planned
from settings import TWO_RANKS
from tiny_models import CONTEXT, tiny_model

pytestmark = MORE

#: Every tenth forward sends running requests back to the queue.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
#: SGLang's pages are of 64 tokens at most.
CACHED = 4 * BUDGET - 64


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def server(name: str, log_dir: Path) -> Iterator[Server]:
    with serve(log_dir, name, "served") as server:
        yield server


def test_tokens_are_those_of_transformers(name: str, server: Server) -> None:
    """One by one, together, and with prefixes of the radix cache."""
    expected, kind = expected_tokens(name), KINDS[name]
    with counting(server, "selections", "selected_tokens", "miss_pages") as counted:
        assert [server.generate(p, NEW_TOKENS).ids for p in PROMPTS] == expected
    selections, selected, misses = counted
    steps = len(PROMPTS) * (NEW_TOKENS - 1)
    assert selections == kind.selecting * steps and misses > 0
    lengths = [len(prompt) + step for prompt in PROMPTS for step in range(1, NEW_TOKENS)]
    mean = (selected - kind.dense * sum(lengths)) / (kind.sparse * steps)
    assert BUDGET - kind.page < mean < BUDGET + kind.page
    again = server.generate_many(PROMPTS, NEW_TOKENS, delay_s=0.05)
    assert [answer.ids for answer in again] == expected
    assert min(answer.cached for answer in again) >= CACHED
    planned = {"context": CONTEXT, "max_requests": 4}
    assert_planned(server, tiny_model(name), kind.config, **planned)


def test_the_selection_matters(name: str) -> None:
    model = attending_all(name)
    dense = [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS[:3]]
    assert dense != expected_tokens(name)[:3]


def test_an_abort_leaves_nothing(name: str, server: Server) -> None:
    expected = expected_tokens(name)
    server.flush_cache()
    got = server.abort_after(PROMPTS[0], num_tokens=5, max_new_tokens=1000)
    assert got[:NEW_TOKENS] == expected[0][: len(got)]
    assert server.generate(PROMPTS[1], NEW_TOKENS).ids == expected[1]
    assert_nothing_held(server)


def test_retracted_requests_get_their_tokens(name: str, log_dir: Path) -> None:
    """What a request had generated is computed again as a prompt, with the same selections."""
    with serve(log_dir, name, "retracted", env=RETRACT, forked=False) as server:
        together = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [answer.ids for answer in together] == expected_tokens(name)
        assert sum(answer.retractions for answer in together) > 0
        assert_nothing_held(server)


def test_two_ranks_give_the_tokens_of_one(name: str, log_dir: Path) -> None:
    with serve(log_dir, name, "ranks", "--tp-size", "2", env=TWO_RANKS) as server:
        answers = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [answer.ids for answer in answers] == expected_tokens(name)
        sizes = server.counted_by("tp_rank", "host_kv_bytes")
        assert len(sizes) == 2 and len(set(sizes.values())) == 1


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("minimax_m3", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6"),
        ("glm_moe_dsa", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6"),
        ("minimax_m3", "--pp-size 2"),
        ("deepseek_v32", "--pp-size 2"),
    ],
)
def test_other_modes_change_no_token(name: str, flags: str, log_dir: Path) -> None:
    case = flags.split()[1].lower()
    with serve(log_dir, name, case, *flags.split(), env=TWO_RANKS) as server:
        answers = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [answer.ids for answer in answers] == expected_tokens(name)
