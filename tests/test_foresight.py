"""Selecting with predicted queries, on the real coordinator: a layer's foretells the next one's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms import DIPR, BaseSparseAlgorithm, Quest, Sketch, TopP
from hisparse.cache import SparseKVCacheManager
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.step import DecodeStep
from hisparse.testing import Request, Simulator
from hisparse.testing.delayed import DelayedStreams, Order
from hisparse.testing.recorder import Recorder
from hisparse.testing.replaying import ReplayingSimulator
from hisparse.types import Selection
from tests.test_replay import SCOPES, assert_same, play, state_of


@pytest.fixture(autouse=True)
def foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = SparseCoordinator.attention

    def foresee_and_attend(self: SparseCoordinator, layer_id: int, q: Tensor, *rest: Any) -> Tensor:
        if self.foresees and self._step is not None and layer_id + 1 < self.policy.kv.num_layers:
            self.foresee(layer_id + 1, q)
        return attention(self, layer_id, q, *rest)

    monkeypatch.setattr(SparseCoordinator, "attention", foresee_and_attend)


def related(request: Request, keep: float = 0.8) -> Request:
    """The request, the cosine of its queries in two adjacent layers about ``keep``."""
    for layer in range(1, len(request.q)):
        new = (1 - keep**2) ** 0.5 * request.q[layer]
        request.q[layer] = keep * request.q[layer - 1] + new
    return request


def outputs(sim: Simulator, steps: int = 40) -> Tensor:
    """Two requests that begin beyond the budget and within it."""
    long, short = sim.request(1, 200, seed=1), sim.request(2, 200, seed=2)
    sim.prefill((related(long), 101), (related(short), 9))
    return torch.stack([sim.decode(long, short) for _ in range(steps)])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="quest"),
        pytest.param({"algorithm": TopP(mass=0.6)}, id="variable-lengths"),
        pytest.param({"min_sparse_context": 80, "dense_layers": (1,)}, id="dense"),
        pytest.param({"reuse_layers": 2}, id="reuse"),
    ],
)
def test_a_layer_attends_what_was_foreseen_unless_its_query_is_another(
    scope: str, settings: dict[str, Any]
) -> None:
    recorder = Recorder(settings.pop("algorithm", Quest()))
    sim = Simulator(
        scope=scope,
        algorithm=recorder,
        layers=5,
        speculate="layer",
        speculate_above=0.75,
        **settings,
    )
    before: list[tuple[int, Tensor]] = []
    found = {True: 0, False: 0}

    def see(layer: int, queries: Tensor, step: DecodeStep, seen: Selection) -> None:
        """The two last selections of a layer are the one foreseen and its own."""
        made, *earlier = reversed([x for x in recorder.retrieved if x.layer_id == layer])
        ahead = next((x for x in earlier if x.seq_lens == made.seq_lens), None)
        foretold = [q for number, q in before if number == layer - 1]
        for row in range(len(step.slots)):
            for head in range(sim.policy.heads):
                expected = made.pages[row][head]
                if ahead is not None:
                    own, other = (
                        q[row].unflatten(0, (sim.policy.heads, -1))[head]
                        for q in (queries, foretold[-1])
                    )
                    holds = torch.cosine_similarity(own, other, dim=-1).mean() > 0.75
                    expected = ahead.pages[row][head] if holds else expected
                    found[bool(holds)] += 1
                assert seen.pages[row, head].tolist() == expected

    sim.coordinator.observe(see)
    attention = sim.coordinator.attention

    def remember(layer: int, q: Tensor, *rest: Any) -> Tensor:
        before.append((layer, q))
        return attention(layer, q, *rest)

    sim.coordinator.attention = remember  # type: ignore[method-assign]
    long, other = sim.request(1, 200, seed=1), sim.request(2, 200, seed=2)
    sim.prefill((related(long), 101), (related(other), 90))
    for _ in range(40):
        sim.decode(long, other)
    assert found[True] > 20, "some are kept"
    assert found[False] > 20, "some are corrected"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_threshold_of_one_is_as_without(scope: str) -> None:
    always = Simulator(scope=scope, layers=4, speculate="layer", speculate_above=1.0)
    assert torch.equal(outputs(always), outputs(Simulator(scope=scope, layers=4)))
    stats = always.manager.counters.stats()
    assert stats.corrected_selections == stats.speculated_selections > 0


def test_pages_of_all_layers_but_the_first_come_ahead() -> None:
    small: dict[str, Any] = {"budget": 48, "device_buffer": 48, "max_row": 48, "layers": 4}
    late = []
    for settings in ({}, {"speculate": "layer", "speculate_above": -1.0}):
        sim = Simulator(**small, **settings)
        outputs(sim)
        stats = sim.manager.counters.stats()
        late.append(stats.miss_pages)
    assert 0 < late[1] < late[0] / 3
    assert stats.corrected_selections == 0 < stats.prefetched_pages


@pytest.mark.parametrize(
    "algorithm", [TopP(mass=0.7), Sketch(), DIPR(beta=3.0)], ids=lambda x: type(x).__name__
)
def test_a_row_with_less_room_attends_the_same(algorithm: BaseSparseAlgorithm) -> None:
    """What lies where the new token's key will be depends on the room, and is not looked at."""
    outs = []
    for room in (192, 40):
        sim = Simulator(
            algorithm=algorithm,
            page_size=8,
            scope="kv_head",
            layers=2,
            budget=40,
            device_buffer=40,
            max_row=room,
            num_recent_pages=2,
            speculate="layer",
            speculate_above=0.3,
        )
        request = related(sim.request(1, 190, seed=1))
        sim.prefill((request, 61))
        outs.append([sim.decode(request) for _ in range(25)])
    assert all(map(torch.equal, *outs))


def test_only_layers_that_select_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[int] = []
    prefetch = SparseKVCacheManager.prefetch

    def spy(self: SparseKVCacheManager, layer_id: int, *rest: Any) -> Any:
        layers.append(layer_id)
        return prefetch(self, layer_id, *rest)

    monkeypatch.setattr(SparseKVCacheManager, "prefetch", spy)
    for dense, expected in (((), [2, 4]), ((2,), [3, 4])):
        sim = Simulator(layers=6, reuse_layers=2, dense_layers=dense, speculate="layer")
        request = sim.request(1, 190, seed=1)
        sim.prefill((request, 120))
        layers.clear()
        sim.decode(request)
        assert layers == expected
        assert [x for x in range(1, 6) if sim.coordinator.selects(x)] == expected


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="quest"),
        pytest.param({"algorithm": TopP(mass=0.7)}, id="ranks-beside-its-tail"),
        pytest.param({"min_sparse_context": 60}, id="dense-beyond-the-budget"),
        pytest.param({"reuse_layers": 2, "device_buffer": 32, "max_row": 32}, id="reuse"),
    ],
)
def test_a_replayed_step_is_the_eager_one(scope: str, settings: dict[str, Any]) -> None:
    options = {"scope": scope, "layers": 4, "speculate": "layer", **settings}
    eager, replaying = Simulator(checked=False, **options), ReplayingSimulator(**options)
    expected, _ = play(eager)
    got, _ = play(replaying)
    assert replaying.num_replayed == len(got), "no step had to run eagerly"
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert_same(state_of(replaying), state_of(eager))
    assert replaying.manager.counters.stats() == eager.manager.counters.stats()


@pytest.mark.parametrize("order", ["early", "late", 1])
def test_pages_that_come_beside_compute_are_waited_for(order: Order) -> None:
    """In whatever order side streams bring them, the same bits."""
    options = {"layers": 4, "max_row": 64, "speculate": "layer", "speculate_above": 0.75}
    streams = DelayedStreams(order)
    plain = Simulator(checked=False, **options)
    beside = Simulator(checked=False, side_streams=streams, **options)
    assert torch.equal(outputs(beside), outputs(plain))
    assert_same(state_of(beside), state_of(plain))
    assert streams.num_delayed > 0 or order == "early"
