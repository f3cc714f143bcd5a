"""``--speculative-algorithm NGRAM``: a real server drafts, and answers what it answers without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import (
    abort_beside_others,
    assert_equal_fresh_and_cached,
    assert_nothing_held,
    retract_until_seen,
)
from conftest import DenseTokens
from harness import Answer, Server
from parts import MORE, few
from settings import CHECKED, SMALL_POOL, SPARSE, WHOLE, latents
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, RETRACTED, SHARED, tokens

pytestmark = MORE

#: Two logits that are closer may change places in another order of sums.
NEAR = 1e-4
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
FLAGS = ("--chunked-prefill-size", "256", "--max-running-requests", "8")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sketch": ("llama", SPARSE),
    "quest": ("llama", CHECKED | {"algorithm": "quest", "budget": 128, "device_buffer_size": 128}),
    "dsa": ("deepseek_v32", latents(128, 512)["deepseek_v32"]),
}


def assert_same_tokens(drafted: Answer, plain: Answer) -> None:
    """Equal up to a token that led by less than :data:`NEAR` without drafts, which is printed."""
    for place, (got, expected) in enumerate(zip(drafted.ids, plain.ids, strict=True)):
        if got != expected:
            best = sorted(plain.top_logprobs[place].values())
            lead = best[-1] - best[-2]
            print(f"token {place}: {got} for {expected}, which led by {lead:.1e}")
            assert lead < NEAR
            return


@pytest.mark.parametrize("name", few(SETTINGS, "sketch"))
def test_drafts_change_no_token(name: str, log_dir: Path) -> None:
    """The first answers are drafted from little; the second ones from the first ones."""
    kind, config = SETTINGS[name]
    prompts = [tokens(n, seed=n) for n in (50, 333, 801, 512, 1500)]
    options = {"config": config, "env": {"TORCHDYNAMO_DISABLE": "1"}}
    flags, log = (*FLAGS, "--max-total-tokens", "20000"), log_dir / f"plain-{name}.log"
    with Server(tiny_model(kind), log, *flags, **options) as server:
        plain = [server.generate(p, NEW_TOKENS, top_logprobs=2) for p in prompts]
    log = log_dir / f"ngram-{name}.log"
    with Server(tiny_model(kind), log, *flags, *NGRAM, **options) as server:
        first = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
        again = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
        both = server.generate_many([*prompts, *prompts[::-1]], NEW_TOKENS, delay_s=0.05)
        assert_nothing_held(server)
    for answers in (first, again, both[:5], both[:4:-1]):
        for drafted, expected in zip(answers, plain, strict=True):
            assert_same_tokens(drafted, expected)
    assert all(answer.verified <= NEW_TOKENS // 4 for answer in again), "few drafts were accepted"


@pytest.fixture(scope="module")
def whole(log_dir: Path) -> Iterator[Server]:
    """A budget of every context, so that answers are those of dense attention."""
    flags = (*FLAGS, *NGRAM, "--max-total-tokens", str(SMALL_POOL))
    flags += ("--schedule-conservativeness", "0.01")
    with Server(tiny_model("llama"), log_dir / "ngram-whole.log", *flags, config=WHOLE) as server:
        yield server


@pytest.mark.modes
def test_a_budget_of_the_whole_context_gives_dense_tokens(
    whole: Server, dense_tokens: DenseTokens
) -> None:
    for case in (PROMPTS, SHARED):
        assert_equal_fresh_and_cached(whole, case, dense_tokens("llama", case))


@pytest.mark.modes
def test_an_abort_beside_others(whole: Server, dense_tokens: DenseTokens) -> None:
    abort_beside_others(whole, dense_tokens("llama", PROMPTS))


@pytest.mark.modes
def test_retracted_requests_start_over_and_end_the_same(
    whole: Server, dense_tokens: DenseTokens
) -> None:
    retract_until_seen(whole, dense_tokens("llama", RETRACTED))


def test_an_algorithm_with_state_of_requests_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "snapkv.log"
    config = SPARSE | {"algorithm": "snapkv"}
    with pytest.raises(RuntimeError), Server(tiny_model("llama"), log, *NGRAM, config=config):
        pass
    lines = [line for line in log.read_text().splitlines() if "hisparse: error: " in line]
    assert any("but algorithm 'snapkv' keeps state of requests" in line for line in lines)
