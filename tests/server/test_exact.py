"""A budget that holds the whole context: greedy tokens are those of dense attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from checks import abort_beside_others, assert_equal_fresh_and_cached, retract_until_seen
from harness import Refused, Server
from parts import MORE, few, more
from plugins import make_dummy_runs
from settings import ROOMY, SMALL_POOL, SMALL_POOL_FLAGS, WHOLE
from test_mixed_chunk import FLAGS as MIXED
from test_mixed_chunk import make_spy, num_mixed
from test_served_speculation import ngram, standalone
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, RETRACTED, SHARED, DenseTokens, tokens

from hisparse.kernels.build.cpu import cpu_library

CHUNKS = ("--chunked-prefill-size", "256")


@dataclass(frozen=True)
class Served:
    """A server and the model that it serves."""

    kind: str
    server: Server


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama", "4096"), id="llama"),
        pytest.param(("qwen2", "256"), id="qwen2 in chunks of 256", marks=MORE),
    ],
)
def served(
    request: pytest.FixtureRequest, log_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind, chunk = request.param
    flags = ("--max-total-tokens", "40000", "--chunked-prefill-size", chunk)
    log = log_dir / f"exact-{kind}.log"
    plugin = make_dummy_runs(tmp_path_factory.mktemp("dummy-runs"))
    options = {"config": ROOMY, "python_path": [plugin]}
    with Server(tiny_model(kind), log, *flags, **options) as server:
        yield Served(kind, server)


@pytest.fixture
def roomy(served: Served) -> Served:
    served.server.flush_cache()
    return served


def test_dummy_runs_alone_change_nothing(served: Served) -> None:
    """SGLang makes them before it serves, to tune kernels, of batches without requests."""
    for mode in ("DECODE", "EXTEND"):
        run = rf"dummy run: {mode} of [1-9]\d* tokens by EagerRunner, 0 bytes written, 0 selections"
        assert re.search(run, served.server.log())


def test_each_prompt_alone(roomy: Served, dense_tokens: DenseTokens) -> None:
    answers = [roomy.server.generate(p, NEW_TOKENS) for p in PROMPTS.prompts]
    assert [a.ids for a in answers] == dense_tokens(roomy.kind, PROMPTS)
    assert [a.cached for a in answers] == [0] * len(answers)


def test_eight_at_the_same_time(roomy: Served, dense_tokens: DenseTokens) -> None:
    answers = roomy.server.generate_many(PROMPTS.prompts, NEW_TOKENS)
    assert [a.ids for a in answers] == dense_tokens(roomy.kind, PROMPTS)


def test_a_shared_prefix_comes_from_the_radix_cache(
    roomy: Served, dense_tokens: DenseTokens
) -> None:
    answers = [roomy.server.generate(p, NEW_TOKENS) for p in SHARED.prompts]
    assert [a.ids for a in answers] == dense_tokens(roomy.kind, SHARED)
    assert [a.cached for a in answers] == [0, 992, 992], "62 whole pages of 16 are shared"


def test_shared_prefixes_at_the_same_time(roomy: Served, dense_tokens: DenseTokens) -> None:
    twice = SHARED.prompts * 2
    answers = roomy.server.generate_many(twice, NEW_TOKENS, delay_s=0.1)
    assert [a.ids for a in answers] == dense_tokens(roomy.kind, SHARED) * 2
    assert max(a.cached for a in answers) >= 992


def test_an_abort_in_mid_decode_leaves_the_others_alone(
    roomy: Served, dense_tokens: DenseTokens
) -> None:
    expected = dense_tokens(roomy.kind, PROMPTS)
    abort_beside_others(roomy.server, expected)
    for number in (6, 3):
        assert roomy.server.generate(PROMPTS.prompts[number], NEW_TOKENS).ids == expected[number]


#: Flags of servers whose small pool makes them retract requests; with "mixed", decode steps run
#: beside chunks of prompts, and with the last two, drafts are verified.
SMALL_POOLS: dict[str, Callable[[], Sequence[str]]] = {
    "chunks": lambda: CHUNKS,
    "mixed": lambda: MIXED,
    "mixed, no overlap": lambda: (*MIXED, "--disable-overlap-schedule"),
    "NGRAM": lambda: (*CHUNKS, *ngram()),
    "STANDALONE": lambda: (*CHUNKS, *standalone()),
}


@pytest.fixture(scope="module", params=few(SMALL_POOLS, "chunks"))
def small_pool(
    request: pytest.FixtureRequest, log_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    name = request.param
    path = [make_spy(tmp_path_factory.mktemp("spy"))] if "mixed" in name else []
    flags, log = (*SMALL_POOLS[name](), *SMALL_POOL_FLAGS), log_dir / f"small-pool-{name}.log"
    with Server(tiny_model("llama"), log, *flags, config=WHOLE, python_path=path) as server:
        yield server
        if path:
            assert num_mixed(server, "resident") > 10


def test_long_prompts_in_chunks_of_256(small_pool: Server, dense_tokens: DenseTokens) -> None:
    for case in (PROMPTS, SHARED):
        assert_equal_fresh_and_cached(small_pool, case, dense_tokens("llama", case))


def test_an_abort_beside_chunks(small_pool: Server, dense_tokens: DenseTokens) -> None:
    abort_beside_others(small_pool, dense_tokens("llama", PROMPTS))


def test_retracted_requests_start_over_and_end_the_same(
    small_pool: Server, dense_tokens: DenseTokens
) -> None:
    retract_until_seen(small_pool, dense_tokens("llama", RETRACTED))
    assert "KV cache pool is full. Retract requests" in small_pool.log()


def test_a_prompt_longer_than_the_pool_gets_400_and_the_server_goes_on(
    small_pool: Server, dense_tokens: DenseTokens
) -> None:
    with pytest.raises(Refused, match="longer than|maximum allowed length") as refused:
        small_pool.generate(tokens(SMALL_POOL + 900, seed=5), 4)
    assert refused.value.status == 400
    after = small_pool.generate(PROMPTS.prompts[3], NEW_TOKENS)
    assert after.ids == dense_tokens("llama", PROMPTS)[3]


@more
@pytest.mark.skipif(cpu_library() is None, reason="the order of PyTorch's sums differs")
def test_a_cached_prefix_changes_no_log_probability_in_bfloat16(log_dir: Path) -> None:
    flags = ("--dtype", "bfloat16", "--max-total-tokens", "20000", "--chunked-prefill-size", "4096")
    config = {"budget": 2048, "host_memory": "1GiB", "device_memory": "300MB"}
    with Server(tiny_model("llama"), log_dir / "bfloat16.log", *flags, config=config) as server:
        # What is left of them after the cached pages is 10, 16 and 13 tokens.
        for prompt in (tokens(n, seed=n) for n in (330, 512, 1501)):
            fresh, cached = (server.generate(prompt, 24, top_logprobs=1) for _ in range(2))
            assert cached.cached >= len(prompt) - 16 and fresh.cached == 0
            assert cached.ids == fresh.ids
            assert cached.logprobs == fresh.logprobs
