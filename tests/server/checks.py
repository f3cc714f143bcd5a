"""What the tests of several modes ask of a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from harness import Answer, Server
from settings import SPARSE
from tiny_models import KV_HEADS, LAYERS
from workload import NEW_TOKENS, PROMPTS, RETRACTED, SHARED, Case, tokens

from tests.processes import wait_until

PAGE = 16

#: A busy machine can stop SGLang's tokenizer while it hands requests on one by one.
_TRIES = 4


def wait_for(server: Server, name: str, minimum: float) -> None:
    """Wait until a counter of hisparse has reached a number."""
    wait_until(lambda: server.counted(name)[0] >= minimum, f"{name} did not reach {minimum}")


@contextmanager
def counting(server: Server, *names: str) -> Iterator[list[float]]:
    """How much counters of hisparse rise in the block; the list is filled at its end."""
    before, risen = server.counted(*names), list[float]()
    yield risen
    risen += [now - then for then, now in zip(before, server.counted(*names), strict=True)]


def assert_nothing_held(server: Server) -> None:
    """An idle server with an empty radix cache holds no tokens, on the host and on the device."""
    server.flush_cache()
    held = ("host_tokens_used", "device_tokens_used")
    wait_until(lambda: not any(server.counted(*held)), "tokens are still held")


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
    """An aborted request has its tokens, changes none of the others', and leaves nothing.

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
    assert got[:NEW_TOKENS] == expected[3][: len(got)]
    assert_nothing_held(server)


def retract_until_seen(server: Server, expected: Sequence[list[int]] | None = None) -> list[Answer]:
    """Answers of ``workload.RETRACTED``, some of which were retracted.

    For requests that may end early SGLang hopes they do, and admits more than fit. One
    request of HTTP has them all: on a busy machine, each of several can wait until those before it
    have ended.

    Args:
        server: its pool does not hold all of the requests.
        expected: their tokens, in every try; None: not compared.
    """
    for _ in range(_TRIES):
        server.flush_cache()
        answers = server.generate_batch(RETRACTED.prompts, RETRACTED.new_tokens, ignore_eos=False)
        if expected is not None:
            assert [answer.ids for answer in answers] == expected
        if any(answer.retractions for answer in answers):
            return answers
    pytest.fail("nothing was retracted, the pool is too large")


#: Tokens of answers whose difference is counted.
_LESS, _MORE = 10, 60


def of_more_tokens(
    server: Server, lengths: Sequence[int], *names: str, delay_s: float = 0.0
) -> list[float]:
    """What counters rise more by for answers of 60 tokens than for answers of 10.

    Steps that the overlap scheduler starts before it knows that a request is over cancel out.

    Args:
        server: with :data:`settings.SPARSE`.
        lengths: of the prompts.
        names: of the counters.
        delay_s: time between two requests.
    """
    prompts, seen = [tokens(n, seed=n + 400) for n in lengths], []
    for new_tokens in (_LESS, _MORE):
        server.flush_cache()
        with counting(server, *names) as counted:
            server.generate_many(prompts, new_tokens, delay_s=delay_s)
        seen.append(counted)
    return [more - less for less, more in zip(*seen, strict=True)]


def selected_between(lengths: Sequence[int]) -> tuple[int, int]:
    """Pages selected, and tokens of tail pages attended, in the steps that make the difference."""
    steps = [n + step for n in lengths for step in range(_LESS, _MORE)]
    pages = sum(min((n - 1) // PAGE, SPARSE["budget"] // PAGE - 1) for n in steps)
    tails = sum((n - 1) % PAGE + 1 for n in steps)
    return pages * LAYERS * KV_HEADS, tails * LAYERS * KV_HEADS
