"""``--pp-size``: ranks that each have some of the layers give the tokens of one rank with all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import assert_nothing_held
from harness import Server
from parts import MORE
from settings import SMALL_ROWS, TWO_RANKS
from tiny_models import LAYERS, TOKEN_BYTES, tiny_model
from workload import tokens

pytestmark = MORE

NEW_TOKENS = 24
PAGE = 16
HOST_BYTES = 30 * 2**20
CONFIG = SMALL_ROWS | {
    "host_memory": HOST_BYTES,
    "dense_layers": [1],
    "layer_metrics": True,
    "checked": True,
}
FLAGS = ("--chunked-prefill-size", "256", "--max-running-requests", "8")
RANKS = (*FLAGS, "--pp-size", "2")
PROMPTS = [tokens(n, seed=n) for n in (50, 333, 801, 1500, 2000)]


def one_by_one(server: Server) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of each prompt when nothing else runs, and the pages that each layer attended."""
    tokens_of = [server.generate(prompt, NEW_TOKENS).ids for prompt in PROMPTS]
    # The last request is not counted before its end.
    server.flush_cache()
    hits, misses = (server.counted_by("layer", f"layer_{x}_pages") for x in ("hit", "miss"))
    return tokens_of, {layer: hits[layer] + misses[layer] for layer in hits}


@pytest.fixture(scope="module")
def single(log_dir: Path) -> tuple[list[list[int]], dict[str, float]]:
    """What one rank gives and counts."""
    with Server(tiny_model("llama"), log_dir / "stage-alone.log", *FLAGS, config=CONFIG) as one:
        return one_by_one(one)


@pytest.fixture(scope="module")
def server(single: object, log_dir: Path) -> Iterator[Server]:
    log = log_dir / "stages.log"
    with Server(tiny_model("llama"), log, *RANKS, config=CONFIG, env=TWO_RANKS) as running:
        yield running


def test_layers_keep_their_numbers(
    server: Server, single: tuple[list[list[int]], dict[str, float]]
) -> None:
    """The second one, which is the first of a rank or its last, is always dense."""
    found = one_by_one(server)
    assert found == single
    pages = found[1]
    assert pages["0"] == pages["2"] != pages["1"]


def test_a_pipeline_gives_one_rank_s_tokens(
    server: Server, single: tuple[list[list[int]], dict[str, float]]
) -> None:
    alone, _ = single
    assert [a.ids for a in server.generate_many(PROMPTS, NEW_TOKENS)] == alone
    again = server.generate_many(PROMPTS, NEW_TOKENS)
    assert [answer.ids for answer in again] == alone
    assert [answer.cached for answer in again] == [
        (len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS
    ]


def test_the_ranks_divide_host_memory_by_their_layers(server: Server) -> None:
    """And agree on the number of tokens, though three layers do not halve."""
    pages = HOST_BYTES // (PAGE * TOKEN_BYTES)
    assert server.counted_by("pp_rank", "host_tokens_total") == dict.fromkeys(
        "01", (pages - 1) * PAGE
    )
    sizes = server.counted_by("pp_rank", "host_kv_bytes")
    assert sum(sizes.values()) == pages * PAGE * TOKEN_BYTES
    assert sorted(sizes.values()) == [pages * PAGE * TOKEN_BYTES * n / LAYERS for n in (1, 2)]


def test_an_aborted_request_leaves_nothing(server: Server) -> None:
    for seed in range(4):
        server.abort_after(tokens(700, seed=seed + 40), 5, 400)
    assert_nothing_held(server)
