"""Prefetch on the real coordinator, compared with a plain model of its rule."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.topp import TopP
from hisparse.testing import Request, Simulator
from hisparse.testing.recorder import Recorder
from hisparse.types import Selection
from tests.sizes import crossed

SCOPES = ["layer", "kv_head", "query_head"]
TOKENS = {
    "page_size": 1,
    "budget": 12,
    "device_buffer": 16,
    "max_row": 16,
    "host_pages": 1600,
    "staging_pages": 16,
}


def min_cosine(value: float) -> dict[str, Any]:
    """The configuration of the extension with this threshold."""
    return {"prefetch": {"min_cosine": value}}


def drifting(request: Request, keep: float) -> Request:
    """Make the queries a random walk: cosines of adjacent queries are about ``keep``."""
    for t in range(1, request.length):
        step = (1 - keep**2) ** 0.5 * request.q[:, t]
        request.q[:, t] = keep * request.q[:, t - 1] + step
    return request


@dataclass
class Rule:
    """A model of the rule in Python: one row of one layer at a time."""

    sim: Simulator
    min_cosine: float
    made: list[Any] = field(default_factory=list)
    ahead: dict[tuple[int, int, int], tuple[int, Tensor, list[int]]] = field(default_factory=dict)
    kept: int = 0
    corrected: int = 0

    def __call__(self, layer: int, queries: Tensor, step: DecodeStep, seen: Selection) -> None:
        """Follows one selection of a layer, as an observer of the coordinator."""
        made = self.made[-1]
        assert made.layer_id == layer
        for row, slot in enumerate(step.slots.tolist()):
            for head, fresh in enumerate(made.pages[row]):
                own = queries[row].unflatten(0, (self.sim.policy.heads, -1))[head]
                fresh = [page for page in fresh if page >= 0]
                pages = self.attended((layer, slot, head), own, made.seq_lens[row], fresh)
                assert seen.pages[row, head].tolist() == pages + [-1] * (
                    seen.pages.shape[-1] - len(pages)
                )
                assert int(seen.lengths[row, head]) == len(pages)
                self.require_sinks_and_recents(pages, made.num_pages[row])

    def attended(
        self, key: tuple[int, int, int], query: Tensor, tokens: int, fresh: list[int]
    ) -> list[int]:
        policy, size = self.sim.policy, self.sim.page_size
        pages, (before, old, known) = fresh, self.ahead.pop(key, (0, query, []))
        if before == tokens - 1:
            alike = torch.cosine_similarity(query, old, dim=-1).mean().item()
            pages = known if alike > self.min_cosine else fresh
            self.kept += pages is known
            self.corrected += pages is fresh
        last, full = divmod(tokens - 1, size)
        coming = list(fresh)
        if full == size - 1 and len(fresh) < policy.max_pages:
            coming = [*fresh, last]
        elif full == size - 1 and policy.num_recent_pages:
            coming = [page for page in fresh if page != last - policy.num_recent_pages] + [last]
        if last > policy.budget_pages and tokens > self.sim.min_sparse_context:
            self.ahead[key] = tokens, query, coming
        return pages

    def require_sinks_and_recents(self, pages: list[int], count: int) -> None:
        policy = self.sim.policy
        sinks = range(min(policy.num_sink_pages, count))
        recents = range(max(0, count - policy.num_recent_pages), count)
        assert {*sinks, *recents} <= set(pages)


def follow(**settings: Any) -> tuple[Simulator, Rule]:
    """A simulated server that compares its selections with the rule."""
    recorder = Recorder(settings.pop("algorithm", Quest()))
    sim = Simulator(algorithm=recorder, **settings)
    rule = Rule(sim, sim.extensions["prefetch"]["min_cosine"], recorder.retrieved)
    sim.coordinator.observe(rule)
    return sim, rule


SETTINGS = [
    pytest.param({}, id="quest"),
    pytest.param({"num_recent_pages": 0, "num_sink_pages": 0}, id="no-recents"),
    pytest.param({"budget": 48, "num_recent_pages": 3}, id="three-recents"),
    pytest.param(TOKENS, id="tokens"),
    pytest.param({"algorithm": TopP(mass=0.6)}, id="variable-lengths"),
    pytest.param({"min_sparse_context": 80}, id="dense-beyond-the-budget"),
    pytest.param({"layers": 4, "reuse_layers": 2, "dense_layers": (1,)}, id="reuse"),
]


@crossed("scope, settings", SCOPES, SETTINGS)
def test_any_trace_attends_what_the_rule_says(scope: str, settings: dict[str, Any]) -> None:
    """Requests come, go, skip steps and are prefilled again; some grow beyond the budget."""
    rng = random.Random(0)
    sim, rule = follow(scope=scope, extensions=min_cosine(0.75), **settings)
    live: dict[int, Request] = {}
    for step in range(90):
        free = [slot for slot in (1, 2, 3) if slot not in live]
        if not live or (free and rng.random() < 0.3):
            slot = rng.choice(free)
            live[slot] = drifting(sim.request(slot, 230, seed=step), 0.8)
            sim.prefill((live[slot], rng.randrange(5, 120)))
        chosen = [r for r in live.values() if rng.random() < 0.8 and r.done < r.length - 20]
        if chosen:
            sim.decode(*chosen)
            if rng.random() < 0.05:
                sim.prefill((chosen[0], rng.randrange(1, 12)))
        if rng.random() < 0.1:
            over = live.pop(rng.choice(list(live)))
            sim.end(over, free=True)
            rule.ahead = {k: v for k, v in rule.ahead.items() if k[1] != over.slot}
    assert rule.kept > 20, "the rule is tried"
    assert rule.corrected > 20, "the rule is tried"
    stats = sim.coordinator.stats()
    assert stats.extensions["prefetched_selections"] == rule.kept + rule.corrected
    assert stats.extensions["corrected_selections"] == rule.corrected


def outputs(sim: Simulator, steps: int = 40) -> Tensor:
    """Two requests that begin beyond the budget and within it."""
    long, short = sim.request(1, 200, seed=1), sim.request(2, 200, seed=2)
    sim.prefill((drifting(long, 0.8), 101), (drifting(short, 0.8), 9))
    return torch.stack([sim.decode(long, short) for _ in range(steps)])


@pytest.mark.parametrize("scope", SCOPES)
def test_a_threshold_of_one_is_as_without(scope: str) -> None:
    always = Simulator(scope=scope, extensions=min_cosine(1.0))
    assert torch.equal(outputs(always), outputs(Simulator(scope=scope)))
    stats = always.coordinator.stats()
    assert stats.extensions["corrected_selections"] == stats.extensions["prefetched_selections"] > 0


@pytest.mark.parametrize("scope", SCOPES)
def test_a_threshold_of_minus_one_never_corrects(scope: str) -> None:
    never = Simulator(scope=scope, extensions=min_cosine(-1.0))
    assert not torch.equal(outputs(never), outputs(Simulator(scope=scope)))
    stats = never.coordinator.stats()
    assert stats.extensions["corrected_selections"] == 0 < stats.extensions["prefetched_selections"]


def test_what_is_kept_is_resident_when_the_layer_begins() -> None:
    """With the smallest rows, every missing page is prefetched by the previous step."""
    small: dict[str, Any] = {"budget": 48, "device_buffer": 48, "max_row": 48}
    plain, ahead = (
        Simulator(**small),
        Simulator(**small, extensions=min_cosine(-1.0)),
    )
    misses = []
    for sim in (plain, ahead):
        request = drifting(sim.request(1, 190, seed=1), 0.8)
        sim.prefill((request, 120))
        sim.decode(request)
        before = sim.coordinator.stats()
        for _ in range(40):
            sim.decode(request)
        after = sim.coordinator.stats()
        misses.append(after.miss_pages - before.miss_pages)
    assert misses[0] > 20
    assert misses[1] == 0
    stats = ahead.coordinator.stats()
    assert stats.prefetched_pages > 20
    page_bytes = ahead.manager.device.page_bytes
    assert stats.decode_read_bytes == (stats.miss_pages + stats.prefetched_pages) * page_bytes


def test_a_row_that_is_used_again_knows_nothing_of_the_old_request() -> None:
    """The new request begins at the token that would have followed in the old request."""
    sim, seen = Simulator(extensions=min_cosine(-1.0)), []
    old = sim.request(1, 200, seed=1)
    sim.prefill((old, 120))
    for _ in range(10):
        sim.decode(old)
    sim.end(old, free=True)
    new = sim.request(1, 200, seed=2)
    sim.prefill((new, 130))
    alone = Simulator(extensions=min_cosine(-1.0))
    same = alone.request(1, 200, seed=2)
    alone.prefill((same, 130))
    for _ in range(12):
        seen.append((sim.decode(new), alone.decode(same)))
    assert all(torch.equal(*pair) for pair in seen)


@crossed("scope, bound", SCOPES, [0, 70])
def test_what_a_request_attends_depends_on_it_alone(scope: str, bound: int) -> None:
    """Beside others it is served in other calls: while it is within the budget or below
    ``min_sparse_context``, and on the step that leaves them.
    """
    together, alone = (attended_by_one(scope, bound, others) for others in (True, False))
    assert together == alone
    assert len(alone) > 50


def attended_by_one(scope: str, bound: int, with_others: bool) -> dict[tuple[int, int], Any]:
    """Maps (tokens, layer) to the attended pages of one request, once it is sparse."""
    sim = Simulator(scope=scope, extensions=min_cosine(0.7), min_sparse_context=bound)
    seen = {}

    def see(layer: int, q: Tensor, step: DecodeStep, selection: Selection) -> None:
        for row, slot in enumerate(step.slots.tolist()):
            tokens = int(step.seq_lens[row])
            if slot == 2 and tokens > max(sim.budget, bound):
                seen[tokens, layer] = selection.pages[row].tolist()

    sim.coordinator.observe(see)
    one = drifting(sim.request(2, 200, seed=5), 0.8)
    sim.prefill((one, 20))
    others = [sim.request(slot, 200, seed=slot) for slot in (1, 3)] if with_others else []
    for request in others:
        sim.prefill((request, 100))
    for step in range(90):
        beside = others[: step % 3]
        sim.decode(*beside[:1], one, *beside[1:])
    return seen


def test_nothing_of_it_is_saved_with_a_context() -> None:
    """A file can be read with and without the extension; a loaded context starts without state."""
    sim, plain = Simulator(extensions=min_cosine(0.5)), Simulator()
    assert sim.representations.describe() == plain.representations.describe()
    request = sim.request(1, 120, seed=1)
    sim.prefill((request, 100))
    pages = torch.tensor(request.host_pages)
    assert sim.representations.read(0, 1, pages).keys() == plain.representations.describe().keys()
