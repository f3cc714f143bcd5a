"""Overlap: the same bits in any order of the side streams, and no missing wait."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch

from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.snapkv import SnapKV
from hisparse.algorithms.topp import TopP
from hisparse.cache.staging import Staging
from hisparse.cache.streams import Pending, SideStreams
from hisparse.testing import Simulator
from hisparse.testing.recording import ReplayingSimulator
from tests.delayed import DelayedStreams, Order
from tests.engine.test_replay import assert_same, play, state_of
from tests.sizes import crossed

T = TypeVar("T")
SCOPES = ["layer", "kv_head", "query_head"]
ORDERS: list[Order] = ["early", "late", 1, 2]
REUSE = {"layers": 5, "reuse_layers": 2}
TIGHT = {"budget": 48, "device_buffer": 48, "max_row": 48}


def long_play(sim: Simulator) -> list[torch.Tensor]:
    """Prompts in chunks over prefixes of several tiles, a shared prefix, and steps in between."""
    one, two = sim.request(1, 190, seed=1, prompt=165), sim.request(2, 190, seed=2, prompt=90)
    outs = [*sim.prefill((one, 61)), *sim.prefill((one, 43), (two, 37)), sim.decode(two)]
    outs += sim.prefill((one, 61), (two, 52))
    outs += [sim.decode(one, two) for _ in range(9)]
    three = sim.request(3, 190, seed=3, like=one, shared=96)
    outs += sim.prefill((three, 30))
    return outs + [sim.decode(three, one, two) for _ in range(14)]


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), f"forward {number}: {(one - other).abs().max()}"


SETTINGS = [
    pytest.param({}, id="sketch"),
    pytest.param(REUSE, id="reuse"),
    pytest.param(REUSE | {"dense_layers": (0, 3), "max_row": 64}, id="reuse-dense-leaders"),
    pytest.param(REUSE | {"algorithm": TopP(mass=0.8)}, id="reuse-topp"),
    pytest.param(REUSE | {"extensions": {"tail_estimate": True}}, id="reuse-tail-estimate"),
    pytest.param({"algorithm": SnapKV(window=4)}, id="snapkv-reads-its-context"),
    pytest.param({"min_sparse_context": 1000, "max_row": 64}, id="staged"),
    # Rows without a spare page: what one load evicts, another one may need.
    pytest.param(REUSE | TIGHT, id="reuse-tight"),
]


@crossed("scope, settings", SCOPES, SETTINGS)
def test_in_any_order_results_are_those_without_overlap(
    scope: str, settings: dict[str, Any]
) -> None:
    """Outputs, the state after the run, and the counters are equal, bit for bit."""
    check(settings | {"scope": scope})


@pytest.mark.parametrize(
    ("start", "more"), [(100, 3), (97, 7), (96, 5)], ids=["within-a-page", "fills-it", "beyond-it"]
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_context_that_is_read_back_has_the_chunk_in_it(
    start: int, more: int, order: Order
) -> None:
    """A prefetched prefix tile may hold the last page as it was before the chunk was written."""
    outs = []
    for options in ({}, {"side_streams": DelayedStreams(order)}):
        sim = Simulator(algorithm=SnapKV(window=4), layers=3, staging_pages=20, **options)
        request = sim.request(1, 190, seed=1, prompt=start + more)
        out = [*sim.prefill((request, start)), *sim.prefill((request, more))]
        outs.append(out + [sim.decode(request) for _ in range(5)])
    assert_equal(outs[1], outs[0])


def test_selections_of_tokens_with_the_models_own_indexer() -> None:
    check(
        {
            "scope": "layer",
            "algorithm": DSA(),
            "page_size": 1,
            "host_pages": 1600,
            "num_sink_pages": 0,
            "num_recent_pages": 0,
            "staging_pages": 16,
        }
        | REUSE
    )


def check(settings: dict[str, Any]) -> None:
    plain = Simulator(**settings)
    expected = long_play(plain)
    for order in ORDERS:
        streams = DelayedStreams(order)
        sim = Simulator(**settings, side_streams=streams)
        assert_equal(long_play(sim), expected)
        assert_same(state_of(sim), state_of(plain))
        assert sim.coordinator.stats() == plain.coordinator.stats()
        assert streams.num_waiting == 0, "nothing outlives its forward"
        assert streams.num_started > 0
        assert (streams.num_delayed > 0) == (order != "early")


def test_layers_that_reuse_a_selection_have_their_pages_before_they_begin() -> None:
    """The transfer of each such layer starts during the first layer of the group."""
    streams = DelayedStreams("early")
    sim = Simulator(**REUSE, side_streams=streams)
    request = sim.request(1, 190, seed=1)
    sim.prefill((request, 150))
    before = streams.num_started
    sim.decode(request)
    assert streams.num_started - before == len([1, 3])


@crossed("scope, order", SCOPES, ORDERS)
def test_a_replayed_step_is_the_eager_one(scope: str, order: Order) -> None:
    settings = REUSE | {"scope": scope, "min_sparse_context": 80}
    eager = Simulator(checked=False, **settings)
    replaying = ReplayingSimulator(side_streams=DelayedStreams(order), **settings)
    expected, got = play(eager)[0], play(replaying)[0]
    assert replaying.num_replayed == len(got), "no step had to run eagerly"
    assert_equal(got, expected)
    assert_same(state_of(replaying), state_of(eager))


@pytest.mark.parametrize(
    ("settings", "aside"),
    [
        pytest.param({}, True, id="sketch"),
        pytest.param({"algorithm": Quest()}, True, id="quest"),
        pytest.param(
            {"algorithm": DSA(), "scope": "layer", "page_size": 1, "host_pages": 1600}
            | {"num_sink_pages": 0, "num_recent_pages": 0},
            False,
            id="dsa-reads-the-indexers-inputs",
        ),
    ],
)
def test_each_layer_of_a_captured_step_serves_full_tail_pages_aside(
    settings: dict[str, Any], aside: bool
) -> None:
    """The step runs twice, to warm up and to be recorded."""
    streams = DelayedStreams("late")
    sim = ReplayingSimulator(**settings, side_streams=streams)
    assert streams.num_started == streams.num_delayed == 2 * sim.layers * aside


def given_up(sim: Simulator) -> list[torch.Tensor]:
    """A forward fails while another request's tile is copied; its slot gets a new request."""
    one, two = sim.request(1, 190, seed=1), sim.request(2, 190, seed=2)
    sim.prefill((one, 24), (two, 24))
    attend, calls = sim.adapter.attend_prefill, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:  # Its next tile, the other request's, is being read.
            raise KeyboardInterrupt
        return attend(*arguments, **options)

    sim.adapter.attend_prefill = interrupted
    with pytest.raises(KeyboardInterrupt):
        sim.prefill((one, 20), (two, 20))
    sim.adapter.attend_prefill = attend
    three = sim.request(2, 190, seed=3, like=one, shared=24)
    return sim.prefill((three, 20))


def test_a_forward_that_is_given_up_leaves_no_tile_behind() -> None:
    expected = given_up(Simulator())
    assert_equal(given_up(Simulator(side_streams=DelayedStreams("late"))), expected)


def test_tiles_are_read_one_ahead_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[tuple[int, int, int]] = []
    start = Staging._start

    def spy(self: Staging, tile: Any, buffer: int) -> Pending[None]:
        tiles.append(tuple(tile[:3]))
        return start(self, tile, buffer)

    monkeypatch.setattr(Staging, "_start", spy)
    sim = Simulator(algorithm=Quest(), side_streams=SideStreams(), staging_pages=3)
    one, two = sim.request(1, 190, seed=1), sim.request(2, 190, seed=2)
    sim.prefill((one, 60), (two, 30))
    assert tiles == []
    sim.prefill((one, 20), (two, 20))
    expected = [(1, 0), (1, 3), (1, 6), (2, 0), (2, 3)]
    assert tiles == [(layer, *tile) for layer in (0, 1) for tile in expected]
