"""Many clients at once: some wait for answers, some talk on, some abort, some hang up."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from disaggregated import Pair
from harness import Answer, Server
from soak.loras import Adapters, served_adapters
from soak.scenarios import Scenario
from soak.traffic import Conversation, Expected, Prompt, Traffic

#: Kind of request to its weight; conversations come on top.
_KINDS = {"plain": 60, "two samples": 8, "abort": 20, "disconnect": 12}


@dataclass(frozen=True)
class Difference:
    """An answer that is not the one that the request gets alone.

    Attributes:
        what: the request, for a message.
        turns: its prompt, and those of the turns before it.
        ids: the answer, up to the first token that differs.
        expected: what the request gets alone.
        cached: tokens of the first prompt that the radix cache had.
    """

    what: str
    turns: list[Prompt]
    ids: list[int]
    expected: list[int]
    cached: int


@dataclass
class Outcome:
    """What became of the requests; threads add to it.

    Attributes:
        counts: "requests", kinds of requests, "retracted", and of answers "equal", "tie",
            "different" and "not compared".
        differences: the answers that are different.
        errors: a line for each request that failed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *names: str) -> None:
        """Count names."""
        with self._lock:
            self.counts.update(names)

    def compare(
        self,
        what: str,
        turns: list[Prompt],
        ids: Sequence[int],
        expected: Expected,
        *,
        lead: float,
        cached: int = 0,
    ) -> bool:
        """Compare an answer, or its beginning, with the request's alone; whether it is equal."""
        place = expected.differs(ids)
        if place is None:
            self.add("equal")
            return True
        if expected.leads[place] < lead:
            self.add("tie")
            return False
        self.add("different")
        wrong = Difference(what, turns, list(ids[: place + 1]), expected.ids[: place + 1], cached)
        with self._lock:
            self.differences.append(wrong)
        return False


def send_all(
    server: Server | Pair,
    traffic: Traffic,
    scenario: Scenario,
    num_requests: int,
    concurrency: int,
) -> Outcome:
    """Send all conversations, and so many requests in all, ``concurrency`` at a time."""
    with served_adapters(server, traffic.adapters) as adapters:
        clients = _Clients(server, traffic, scenario, adapters)
        jobs: list[Callable[[], None]] = []
        for talk in traffic.conversations:
            jobs.append(partial(clients.converse, talk))
        rng = random.Random(num_requests)
        turns = sum(1 + len(talk.replies) for talk in traffic.conversations)
        kinds = rng.choices(list(_KINDS), list(_KINDS.values()), k=num_requests - turns)
        for kind in kinds:
            number, at = rng.randrange(len(traffic.prompts)), rng.random()
            jobs.append(partial(clients.send, kind, number, at))
        rng.shuffle(jobs)
        with ThreadPoolExecutor(concurrency) as threads:
            for done in [threads.submit(clients.guarded, job) for job in jobs]:
                done.result()
    if traffic.adapters:
        clients.outcome.counts["adapters loaded"] = adapters.num_loads
    return clients.outcome


class _Clients:
    """Sends requests and notes what they get."""

    def __init__(
        self, server: Server | Pair, traffic: Traffic, scenario: Scenario, adapters: Adapters
    ) -> None:
        self._server, self._traffic, self._scenario = server, traffic, scenario
        self._adapters = adapters
        self.outcome = Outcome()

    def guarded(self, job: Callable[[], None]) -> None:
        """Run a job; its error, a time-out among them, is a fault of the server."""
        try:
            job()
        except Exception as error:
            self.outcome.errors.append(f"{type(error).__name__}: {str(error)[:500]}")

    def send(self, kind: str, number: int, at: float) -> None:
        """One request of a kind; ``at`` in [0, 1) says when it ends early."""
        prompt = self._traffic.prompts[number]
        expected = self._traffic.expected[number]
        what = f"{kind}, prompt {number}"
        self.outcome.add("requests", kind)
        early = int(at * prompt.new_tokens)
        if kind == "plain":
            self._compare(what, [prompt], self._generate(prompt), expected)
        elif kind == "two samples":
            with self._adapters.loaded(prompt.adapter) as body:
                answers = self._server.samples(prompt.ids, prompt.new_tokens, 2, **body)
            for answer in answers:
                self._compare(what, [prompt], answer, expected)
        else:
            leave = self._abort if kind == "abort" else self._hang_up
            with self._adapters.loaded(prompt.adapter) as body:
                ids = leave(prompt, early, body)
            if self._scenario.whole or not self._scenario.retracts:
                self.outcome.compare(what, [prompt], ids, expected, lead=self._scenario.lead)

    def _generate(self, prompt: Prompt) -> Answer:
        with self._adapters.loaded(prompt.adapter) as body:
            return self._server.generate(prompt.ids, prompt.new_tokens, **body)

    def _abort(self, prompt: Prompt, early: int, body: dict[str, str]) -> list[int]:
        return self._server.abort_after(prompt.ids, early, 2 * prompt.new_tokens, **body)

    def _hang_up(self, prompt: Prompt, early: int, body: dict[str, str]) -> list[int]:
        """Close the connection; for ``early`` 0 before the first token."""
        ids: list[int] = []
        with self._server.stream(prompt.ids, 2 * prompt.new_tokens, **body) as events:
            while len(ids) < early:
                ids = next(events)["output_ids"]
        return ids

    def converse(self, talk: Conversation) -> None:
        """A conversation; it ends when an answer is another one, since later turns differ."""
        turns, first_cached = [talk.first], 0
        for number, expected in enumerate(talk.expected):
            self.outcome.add("requests", "turn of a conversation")
            answer = self._generate(turns[-1])
            if number == 0:
                first_cached = answer.cached
            # K/V of an answer that left the radix cache are computed anew, as those of a prompt.
            if number and answer.cached != expected.cached and not self._scenario.whole:
                self.outcome.add("not compared")
                return
            what = f"turn {number + 1}"
            if not self._compare(what, list(turns), answer, expected, cached=first_cached):
                return
            if number < len(talk.replies):
                turns.append(talk.turn(number + 1, turns[-1].ids, answer.ids))

    def _compare(
        self,
        what: str,
        turns: list[Prompt],
        answer: Answer,
        expected: Expected,
        *,
        cached: int | None = None,
    ) -> bool:
        """Compare if the answer has to be that of the request alone; whether it is the same."""
        if answer.retractions:
            self.outcome.add("retracted")
            if not self._scenario.whole:
                self.outcome.add("not compared")
                return False
        cached = answer.cached if cached is None else cached
        lead = self._scenario.lead
        return self.outcome.compare(what, turns, answer.ids, expected, lead=lead, cached=cached)
