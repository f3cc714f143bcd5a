"""What the tests of several modes ask of a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import Answer, Server
from workload import NEW_TOKENS, PROMPTS, RETRACTED, SHARED, Case

__all__ = [
    "abort_beside_others",
    "alone",
    "assert_equal_fresh_and_cached",
    "assert_nothing_held",
    "certain",
    "retract_until_seen",
]

#: Times between two requests. Whether some are retracted depends on when they come, so on the
#: machine's load too.
_DELAYS_S = (0.1, 0.3, 0.03, 1.0)


def assert_nothing_held(server: Server) -> None:
    """An idle server with an empty radix cache holds no tokens, on the host and on the device."""
    server.flush_cache()
    end = time.monotonic() + 60
    while any(held := server.counted("host_tokens_used", "device_tokens_used")):
        assert time.monotonic() < end, f"host and device tokens still used: {held}"
        time.sleep(0.1)


def assert_equal_fresh_and_cached(
    server: Server, case: Case, expected: Sequence[list[int]]
) -> None:
    """Prompts at once give the expected tokens, computed and with prefixes of the radix cache."""
    server.flush_cache()
    for _ in range(2):
        answers = server.generate_many(case.prompts, NEW_TOKENS, delay_s=0.05)
        assert [answer.ids for answer in answers] == expected
    if case is SHARED:
        assert max(answer.cached for answer in answers) >= 992


def alone(server: Server, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Tokens of each prompt when nothing else runs and nothing is cached, before or after."""
    found = []
    for prompt in prompts:
        server.flush_cache()
        found.append(server.generate(prompt, new_tokens).ids)
    server.flush_cache()
    return found


def certain(answer: Answer, lead: float) -> list[int]:
    """The tokens before the first that another may overtake.

    Args:
        answer: with the two best logprobs of each token.
        lead: how much the best one has to lead by, in logprob. Eight bits magnify float32 noise,
            which the size of a batch and the pieces of a prompt make.
    """
    for step, found in enumerate(answer.top_logprobs):
        best, second = sorted(found.values(), reverse=True)
        if best - second < lead:
            return answer.ids[:step]
    return answer.ids


def abort_beside_others(server: Server, expected: Sequence[list[int]]) -> None:
    """An aborted request changes no token of the others, and leaves nothing.

    Args:
        server: answers as ``expected``.
        expected: tokens of ``workload.PROMPTS``.
    """
    server.flush_cache()
    with ThreadPoolExecutor(1) as thread:
        prompts = PROMPTS.prompts
        others = thread.submit(server.generate_many, prompts[:6], NEW_TOKENS, delay_s=0.1)
        got = server.abort_after(prompts[3], num_tokens=10, max_new_tokens=900)
        assert [answer.ids for answer in others.result()] == expected[:6]
    assert 10 <= len(got) < 900
    assert_nothing_held(server)


def retract_until_seen(server: Server, expected: Sequence[list[int]] | None = None) -> list[Answer]:
    """Answers of ``workload.RETRACTED``, some of which were retracted.

    Args:
        server: its pool does not hold all of the requests.
        expected: their tokens, in every try; None: not compared.
    """
    for delay_s in _DELAYS_S:
        server.flush_cache()
        answers = server.generate_many(
            RETRACTED.prompts, RETRACTED.new_tokens, delay_s=delay_s, ignore_eos=False
        )
        if expected is not None:
            assert [answer.ids for answer in answers] == expected
        if any(answer.retractions for answer in answers):
            return answers
    pytest.fail("nothing was retracted, the pool is too large")
