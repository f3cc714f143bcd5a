"""Drafts by n-grams and by draft models: a real server answers what it answers without drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checks import assert_nothing_held
from draft_models import eagle3_head, eagle_head, noisy_model, with_next_layer
from harness import Answer, Server
from parts import MORE, few
from settings import CHECKED, SPARSE, latents
from tiny_models import tiny_model
from workload import NEW_TOKENS, tokens

pytestmark = MORE

#: Two logits that are closer may change places in another order of sums.
NEAR = 1e-4
FLAGS = ("--chunked-prefill-size", "256", "--max-running-requests", "8")
POOL = ("--max-total-tokens", "20000")
ENV = {"TORCHDYNAMO_DISABLE": "1"}
HERE = [tokens(n, seed=n) for n in (50, 333, 801, 512, 1500)]
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sketch": ("llama", SPARSE),
    "quest": ("llama", CHECKED | {"algorithm": "quest", "budget": 128, "device_buffer_size": 128}),
    "dsa": ("deepseek_v32", latents(128, 512)["deepseek_v32"]),
    "shared": ("glm_moe_dsa", latents(128, 512)["deepseek_v32"]),
}


def drafting(algorithm: str, draft: Path | None = None, steps: int | None = None) -> list[str]:
    """SGLang's flags."""
    flags = ["--speculative-algorithm", algorithm]
    flags += [] if draft is None else ["--speculative-draft-model-path", str(draft)]
    return flags + ([] if steps is None else ["--speculative-num-steps", str(steps)])


def ngram() -> list[str]:
    return [*drafting("NGRAM"), "--speculative-num-draft-tokens", "8"]


def standalone() -> list[str]:
    return drafting("STANDALONE", noisy_model("llama"))


#: A setting, the flags, and the part of the tokens after the first that may take a forward each:
#: the heads are made from the target's weights, and almost none of their drafts is taken.
CASES: dict[str, tuple[str, Callable[[], list[str]], float]] = {
    "NGRAM": ("sketch", ngram, 1.01),
    "NGRAM, quest": ("quest", ngram, 1.01),
    "NGRAM, dsa": ("dsa", ngram, 1.01),
    "STANDALONE": ("sketch", standalone, 0.9),
    "EAGLE": ("quest", lambda: drafting("EAGLE", eagle_head("llama"), 5), 1.01),
    "EAGLE3": ("quest", lambda: drafting("EAGLE3", eagle3_head("llama"), 1), 1.01),
    "NEXTN": ("dsa", lambda: drafting("NEXTN"), 1.01),
    "NEXTN, shared": ("shared", lambda: drafting("NEXTN"), 1.01),
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
            with Server(tiny_model(kind), log, *FLAGS, *POOL, config=config, env=ENV) as server:
                answers[name] = [server.generate(p, NEW_TOKENS, top_logprobs=2) for p in HERE]
        return answers[name]

    return answers_of


def assert_same_tokens(drafted: Answer, plain: Answer) -> None:
    """Equal up to a token that led by less than :data:`NEAR` without drafts, which is printed."""
    for place, (got, expected) in enumerate(zip(drafted.ids, plain.ids, strict=True)):
        if got != expected:
            best = sorted(plain.top_logprobs[place].values())
            lead = best[-1] - best[-2]
            print(f"token {place}: {got} for {expected}, which led by {lead:.1e}")
            assert lead < NEAR
            return


@pytest.mark.parametrize("name", few(CASES, "NGRAM", "STANDALONE"))
def test_drafts_change_no_token(name: str, plain: Plain, log_dir: Path) -> None:
    """N-grams draft the first answers from little, and the second ones from the first ones."""
    setting, flags, most = CASES[name]
    kind, config = SETTINGS[setting]
    model = with_next_layer(kind) if "NEXTN" in name else tiny_model(kind)
    if "NGRAM" not in name:
        config = config | {"device_memory": "600MB"}
    expected = plain(setting)
    log = log_dir / f"{name}.log"
    with Server(model, log, *FLAGS, *POOL, *flags(), config=config, env=ENV) as server:
        first, again = ([server.generate(p, NEW_TOKENS) for p in HERE] for _ in range(2))
        both = server.generate_many([*HERE, *HERE[::-1]], NEW_TOKENS, delay_s=0.05)
        assert_nothing_held(server)
    for answers in (first, again, both[:5], both[:4:-1]):
        for drafted, each in zip(answers, expected, strict=True):
            assert_same_tokens(drafted, each)
    if "NGRAM" in name:
        assert all(x.verified <= NEW_TOKENS // 4 for x in again), "few drafts were accepted"
    # One forward gives one token, and each accepted draft one more.
    forwards = sum(answer.verified for answer in first)
    assert 0 < forwards < len(first) * (NEW_TOKENS - 1) * most
