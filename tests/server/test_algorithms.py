"""Every algorithm through the real server, four requests at once, every selection verified.

``checked`` compares each selection with the contract and each selected page's bytes with the host's
in every step; what is left to see from outside is that tokens depend only on the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import alone, assert_nothing_held
from harness import Server
from parts import MORE, few
from planned_bytes import assert_planned
from plugins import make_exact_products
from settings import SMALL_ROWS
from tiny_models import CONTEXT, LAYERS, tiny_model
from workload import NEW_TOKENS, PROMPTS, SHARED, DenseTokens

#: One context within the budget, three far beyond it.
FOUR = [0, 2, 4, 5]
QUERY_WINDOW = 48

CASES: dict[str, dict[str, Any]] = {
    "quest-bfloat16": {
        "algorithm": "quest",
        "algorithm_config": {"summary_dtype": "bfloat16"},
    },
    "snapkv": {"algorithm": "snapkv", "algorithm_config": {"window": QUERY_WINDOW}},
    "streaming": {"algorithm": "streaming"},
    "dipr": {"algorithm": "dipr", "algorithm_config": {"alpha": 0.5}},
    "oracle": {"algorithm": "oracle", "selection_scope": "query_head"},
    "oracle-token-wise": {"algorithm": "oracle", "page_size": 1, "selection_scope": "layer"},
    "sketch": {"algorithm": "sketch", "tail_estimate": True},
    # Fewer candidates than the longest contexts have pages.
    "sketch-economy": {"algorithm_config": {"economy": True}},
    # The last layer attends what the second one selects.
    "reuse-layers": {"algorithm": "quest", "reuse_layers": LAYERS, "dense_layers": [0]},
}
#: What ``make test`` runs.
USUAL = ("quest-bfloat16", "snapkv", "dipr", "sketch", "reuse-layers")
COMMON = SMALL_ROWS | {"device_memory": "64MB", "checked": True}


@pytest.fixture(scope="module", params=few(CASES, *USUAL, others=MORE))
def server(
    request: pytest.FixtureRequest, log_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    config = CASES[request.param] | COMMON
    flags = ("--max-total-tokens", "40000", "--max-running-requests", "4")
    log = log_dir / f"algorithm-{request.param}.log"
    plugin = make_exact_products(tmp_path_factory.mktemp("exact-products"))
    options = {"config": config, "python_path": [plugin]}
    with Server(tiny_model("llama"), log, *flags, **options) as started:
        started.case = request.param
        yield started


def test_four_at_once_answer_as_alone_and_leave_nothing_behind(
    server: Server, dense_tokens: DenseTokens
) -> None:
    prompts = [PROMPTS.prompts[i] for i in FOUR]
    expected = alone(server, prompts, NEW_TOKENS)
    # Slots and device pages now held others before.
    together = server.generate_many(prompts[::-1], NEW_TOKENS)
    assert [answer.ids for answer in together[::-1]] == expected
    dense = [dense_tokens("llama", PROMPTS)[i] for i in FOUR]
    assert expected[0] == dense[0], "50 + 40 tokens are within the budget"
    assert expected[1:] != dense[1:], "contexts beyond the budget were attended whole"
    hits, misses = server.counted("hit_pages", "miss_pages")
    assert hits > 0
    assert misses > 0
    assert_nothing_held(server)


def test_a_shared_prefix_gives_what_each_gives_alone(server: Server) -> None:
    expected = alone(server, SHARED.prompts, NEW_TOKENS)
    answers = [server.generate(prompt, NEW_TOKENS) for prompt in SHARED.prompts]
    assert [answer.ids for answer in answers] == expected
    cached = [0, 992, 992]
    if server.case == "snapkv":
        # The last queries of the prompt are computed, whatever the cache holds.
        cached[2] = (len(SHARED.prompts[2]) - QUERY_WINDOW) // 16 * 16
    assert [answer.cached for answer in answers] == cached


def test_bytes_are_those_of_the_plan(server: Server) -> None:
    config = CASES[server.case] | COMMON
    assert_planned(server, tiny_model("llama"), config, context=CONTEXT, max_requests=4)
