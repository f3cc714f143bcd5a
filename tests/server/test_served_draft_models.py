"""EAGLE, NEXTN and STANDALONE: a draft model drafts, and answers are what they are without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checks import (
    abort_beside_others,
    assert_equal_fresh_and_cached,
    assert_nothing_held,
    retract_until_seen,
)
from conftest import DenseTokens
from draft_models import eagle3_head, eagle_head, noisy_model, with_next_layer
from harness import Answer, Server
from parts import MORE, few
from test_served_speculation import SETTINGS, WHOLE, assert_same_tokens
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, RETRACTED, SHARED, tokens

pytestmark = MORE

FLAGS = ("--chunked-prefill-size", "256", "--max-running-requests", "8")
ENV = {"TORCHDYNAMO_DISABLE": "1"}
PROMPTS_HERE = [tokens(n, seed=n) for n in (50, 333, 801, 512, 1500)]


def algorithm(name: str, draft: Path | None = None) -> tuple[str, ...]:
    flags = ("--speculative-algorithm", name)
    return flags if draft is None else (*flags, "--speculative-draft-model-path", str(draft))


#: Flags, the target, the setting without drafts, and whether drafts of so poor a model are taken.
CASES: dict[str, tuple[Callable[[], tuple[str, ...]], Callable[[], Path], str, bool]] = {
    "STANDALONE": (
        lambda: algorithm("STANDALONE", noisy_model("llama")),
        lambda: tiny_model("llama"),
        "sketch",
        True,
    ),
    "EAGLE": (
        lambda: (*algorithm("EAGLE", eagle_head("llama")), "--speculative-num-steps", "5"),
        lambda: tiny_model("llama"),
        "quest",
        False,
    ),
    "EAGLE3": (
        lambda: (*algorithm("EAGLE3", eagle3_head("llama")), "--speculative-num-steps", "1"),
        lambda: tiny_model("llama"),
        "quest",
        False,
    ),
    "NEXTN": (
        lambda: algorithm("NEXTN"),
        lambda: with_next_layer("deepseek_v32"),
        "dsa",
        False,
    ),
}

Plain = Callable[[str], list[Answer]]


@pytest.fixture(scope="module")
def plain(log_dir: Path) -> Plain:
    """Answers without drafts, by the name of a setting."""
    answers: dict[str, list[Answer]] = {}

    def answers_of(name: str) -> list[Answer]:
        if name not in answers:
            kind, config = SETTINGS[name]
            log = log_dir / f"undrafted-{name}.log"
            flags = (*FLAGS, "--max-total-tokens", "20000")
            with Server(tiny_model(kind), log, *flags, config=config, env=ENV) as server:
                answers[name] = [
                    server.generate(p, NEW_TOKENS, top_logprobs=2) for p in PROMPTS_HERE
                ]
        return answers[name]

    return answers_of


@pytest.mark.parametrize("name", few(CASES, "STANDALONE"))
def test_drafts_change_no_token(name: str, plain: Plain, log_dir: Path) -> None:
    flags, target, setting, likely = CASES[name]
    expected, config = plain(setting), SETTINGS[setting][1] | {"device_memory": "600MB"}
    log = log_dir / f"{name}.log"
    flags = (*FLAGS, "--max-total-tokens", "20000", *flags())
    with Server(target(), log, *flags, config=config, env=ENV) as server:
        first = [server.generate(prompt, NEW_TOKENS) for prompt in PROMPTS_HERE]
        both = server.generate_many([*PROMPTS_HERE, *PROMPTS_HERE[::-1]], NEW_TOKENS, delay_s=0.05)
        assert_nothing_held(server)
    for answers in (first, both[:5], both[:4:-1]):
        for drafted, each in zip(answers, expected, strict=True):
            assert_same_tokens(drafted, each)
    # One forward gives one token, and each accepted draft one more.
    forwards = sum(answer.verified for answer in first)
    assert 0 < forwards < len(first) * (NEW_TOKENS - 1) * (0.9 if likely else 1.01)


@pytest.fixture(scope="module")
def whole(log_dir: Path) -> Iterator[Server]:
    """A budget of every context, so that answers are those of dense attention."""
    flags = (*FLAGS, *CASES["STANDALONE"][0](), "--max-total-tokens", "4096")
    flags += ("--schedule-conservativeness", "0.01")
    with Server(tiny_model("llama"), log_dir / "standalone.log", *flags, config=WHOLE) as server:
        yield server


@pytest.mark.modes
def test_shared_prefixes_give_dense_tokens(whole: Server, dense_tokens: DenseTokens) -> None:
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
