"""A budget that holds the whole context: greedy tokens are those of dense attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checks import abort_beside_others, retract_until_seen
from harness import Refused, Server
from plugins import make_dummy_runs
from settings import ROOMY, SMALL_POOL, SMALL_POOL_FLAGS, WHOLE
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, RETRACTED, SHARED, DenseTokens, tokens


@dataclass(frozen=True)
class Served:
    """A server and the model that it serves."""

    kind: str
    server: Server


@pytest.fixture(
    scope="module",
    params=[("llama", "4096"), ("qwen2", "256")],
    ids=["llama", "qwen2 in chunks of 256"],
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


@pytest.fixture(scope="module")
def small_pool(log_dir: Path) -> Iterator[Server]:
    flags = (*SMALL_POOL_FLAGS, "--chunked-prefill-size", "256")
    log = log_dir / "exact-small-pool.log"
    with Server(tiny_model("llama"), log, *flags, config=WHOLE) as server:
        yield server


def test_long_prompts_in_chunks_of_256(small_pool: Server, dense_tokens: DenseTokens) -> None:
    small_pool.flush_cache()
    answers = small_pool.generate_many(PROMPTS.prompts, NEW_TOKENS)
    assert [a.ids for a in answers] == dense_tokens("llama", PROMPTS)


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
