"""Attention in two parts, while pages arrive: near the plain one, to the request's own bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_overlap import ORDERS, Forgetful, assert_equal, long_play
from test_replay import assert_same, play, state_of
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms import TopP
from hisparse.cache import SparseKVCacheManager
from hisparse.cache.last_pages import LastPages
from hisparse.cache.streams import InlineStreams
from hisparse.engine import sparse_attention as selected
from hisparse.testing import Request, Simulator
from hisparse.testing.delayed import DelayedStreams
from hisparse.testing.replaying import ReplayingSimulator
from hisparse.types import Selection

SCOPES = ["layer", "kv_head", "query_head"]
#: A row's device pages are as few as they may be: what is selected, and the tail.
TIGHT = {"device_buffer": 32, "max_row": 32}


def split(streams: Any = None, **settings: Any) -> Simulator:
    return Simulator(**settings, side_streams=streams or InlineStreams(), split=True)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="quest"),
        pytest.param(TIGHT, id="tight"),
        pytest.param({"layers": 5, "reuse_layers": 2, "dense_layers": (0,)}, id="reuse"),
        pytest.param({"algorithm": TopP(mass=0.8)}, id="topp"),
        pytest.param({"tail_estimate": True}, id="tail-estimate"),
        pytest.param({"min_sparse_context": 100}, id="dense-beyond-the-budget"),
        pytest.param({"speculate": "step", "speculate_above": 0.3} | TIGHT, id="speculate"),
    ],
)
@pytest.mark.parametrize("scope", SCOPES)
def test_in_any_order_results_are_near_those_at_once(scope: str, settings: dict[str, Any]) -> None:
    settings = settings | {"scope": scope}
    plain = Simulator(**settings)
    expected = long_play(plain)
    outs = []
    for order in ORDERS:
        streams = DelayedStreams(order)
        sim = split(streams, **settings)
        outs.append(long_play(sim))
        assert_same(state_of(sim), state_of(plain))
        assert sim.manager.counters.stats() == plain.manager.counters.stats()
        assert streams.num_waiting == 0
    for one, other in zip(outs[0], expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=2e-6)
    assert not all(map(torch.equal, outs[0], expected)), "nothing was split"
    for found in outs[1:]:
        assert_equal(found, outs[0])


def test_parts_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page in the first part, none in the second, none in either, some in both."""
    seen: list[tuple[int, int]] = []
    in_front = selected._in_front

    def spy(slots: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        counts = zip(chosen.sum(1).tolist(), (slots >= 0).sum(1).tolist(), strict=True)
        seen.extend((first, total - first) for first, total in counts)
        return in_front(slots, chosen)

    monkeypatch.setattr(selected, "_in_front", spy)
    outs = []
    for sim in (split(DelayedStreams("late")), Simulator()):
        long, short = sim.request(1, 190, seed=1), sim.request(2, 190, seed=2)
        sim.prefill((long, 101), (short, 3))
        outs.append([sim.decode(long, short) for _ in range(30)])
    kinds = {(first > 0, others > 0) for first, others in seen}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    for one, other in zip(*outs, strict=True):
        assert_close(one, other, rtol=1e-5, atol=2e-6)


def decode_alone(room: dict[str, Any]) -> Tensor:
    sim = split(**room)
    request = sim.request(2, 190, seed=6)
    sim.prefill((request, 20))
    return torch.stack([sim.decode(request)[:, 0] for _ in range(120)])


def decode_among_others(room: dict[str, Any]) -> Tensor:
    """From within the budget to beyond it, while others come and go and rows shrink and grow."""
    sim, outs, others = split(**room), [], []
    request = sim.request(2, 190, seed=6)
    sim.prefill((request, 20))
    for step in range(120):
        if step % 12 == 5:
            others.append(sim.request([1, 3, 4][step // 12 % 3], 150, seed=step))
            sim.prefill((others[-1], 90 + step // 3))
        if step % 12 == 11:
            sim.end(others.pop(0))
        batch = [*others, request] if step % 2 else [request, *others]
        outs.append(sim.decode(*batch)[:, batch.index(request)])
    return torch.stack(outs)


def assert_bits_are_the_requests_own(scope: str) -> None:
    heads = {"layer": 1, "kv_head": 2, "query_head": 4}[scope]
    roomy = {"scope": scope, "max_row": 192, "host_pages": 400}
    crowded = roomy | {"device_buffer": 48, "device_pages": 24 * heads}
    expected = decode_alone(roomy)
    assert torch.equal(decode_alone(crowded | {"max_row": 48}), expected)
    assert torch.equal(decode_among_others(crowded), expected)


@pytest.mark.parametrize("scope", SCOPES)
def test_other_requests_and_room_never_change_a_bit(scope: str) -> None:
    """Invariant 4: what is split is a matter of the request's own selections."""
    assert_bits_are_the_requests_own(scope)


def test_a_split_by_residency_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    begin, last = SparseKVCacheManager.begin_swap_in, {}

    def keep(self: SparseKVCacheManager, *arguments: Any) -> Any:
        swap = begin(self, *arguments)
        last["diff"] = swap.diff.join()
        return swap

    def hits(self: LastPages, layer_id: int, selection: Selection, step: Any) -> Tensor:
        diff = last["diff"]
        slots = diff.curr_device_slots
        loaded = (slots[..., None] == diff.load_device_slots[:, None]).any(-1)
        return (slots >= 0) & ~loaded

    monkeypatch.setattr(SparseKVCacheManager, "begin_swap_in", keep)
    monkeypatch.setattr(LastPages, "find", hits)
    with pytest.raises(AssertionError):
        assert_bits_are_the_requests_own("kv_head")


def reused_slot() -> tuple[Tensor, Tensor]:
    """A slot's next request goes on at the very length at which the last one stopped."""
    outs = []
    for sim in (split(DelayedStreams("late"), **TIGHT), Simulator(**TIGHT)):
        first = sim.request(1, 190, seed=1)
        sim.prefill((first, 101))
        for _ in range(9):
            sim.decode(first)
        sim.end(first, free=True)
        second = sim.request(1, 190, seed=2)
        sim.prefill((second, 110))
        outs.append(torch.stack([sim.decode(second) for _ in range(5)]))
    return outs[0], outs[1]


def test_a_row_knows_nothing_of_its_last_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    got, expected = reused_slot()
    assert_close(got, expected, rtol=1e-5, atol=2e-6)
    monkeypatch.setattr(LastPages, "forget", lambda self, rows: None)
    got, expected = reused_slot()
    assert not torch.allclose(got, expected, rtol=1e-5, atol=2e-6), "the test can fail"


def test_tokens_of_a_prompt_in_between_make_what_is_known_unfit() -> None:
    outs = []
    for sim in (split(DelayedStreams("late"), **TIGHT), Simulator(**TIGHT)):
        request = sim.request(1, 190, seed=1)
        sim.prefill((request, 101))
        found = [sim.decode(request) for _ in range(9)]
        for chunk in (1, 30):
            sim.prefill((request, chunk))
            found += [sim.decode(request) for _ in range(5)]
        outs.append(torch.stack(found))
    assert_close(outs[0], outs[1], rtol=1e-5, atol=2e-6)


def test_a_forgotten_wait_shows() -> None:
    settings = TIGHT | {"checked": False}
    expected = long_play(split(**settings))
    assert_equal(long_play(split(Forgetful("nobody's"), **settings)), expected)
    got = long_play(split(Forgetful("begin_swap_in"), **settings))
    assert not all(map(torch.equal, got, expected))


@pytest.mark.parametrize("settings", [{}, {"min_sparse_context": 80}], ids=["sparse", "dense-too"])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_replayed_step_is_the_eager_one(scope: str, settings: dict[str, Any]) -> None:
    settings = settings | {"scope": scope}
    eager = split(checked=False, **settings)
    late = DelayedStreams("late")
    replaying = ReplayingSimulator(side_streams=late, split=True, **settings)
    expected, got = play(eager)[0], play(replaying)[0]
    assert replaying.num_replayed == len(got), "no step had to run eagerly"
    assert late.num_delayed > 0
    assert_equal(got, expected)
    assert_same(state_of(replaying), state_of(eager))


class Foreseeing(Simulator):
    """Before each layer its queries are predicted: some right, some wrong."""

    def decode(self, *requests: Request) -> Tensor:
        batch = self.next_tokens(*requests)
        self.coordinator.forward_begin(batch)
        outs = []
        for layer in range(self.layers):
            q, k, v = (
                torch.stack([r.streams[i][layer, r.done - 1] for r in requests]) for i in range(3)
            )
            right = torch.tensor([r.done % 3 > 0 for r in requests])
            self.coordinator.foresee(layer, torch.where(right[:, None, None], q, -q))
            outs.append(self.coordinator.attention(layer, q, k, v))
        self.coordinator.forward_end()
        return torch.stack(outs)


def test_pages_that_are_foreseen_are_in_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first step too, before which none is known."""
    outs, in_first = [], []
    in_front = selected._in_front

    def spy(slots: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        in_first.append(int(chosen.sum()))
        return in_front(slots, chosen)

    monkeypatch.setattr(selected, "_in_front", spy)
    for order in (None, *ORDERS):
        streams = order and DelayedStreams(order)
        settings = TIGHT | {"speculate": "layer", "speculate_above": 0.3}
        sim = Foreseeing(**settings, side_streams=streams, split=streams is not None)
        one, two = sim.request(1, 190, seed=1), sim.request(2, 190, seed=2)
        sim.prefill((one, 101), (two, 59))
        outs.append(torch.stack([sim.decode(one, two) for _ in range(20)]))
    assert in_first[0] > 0
    plain, *split_outs = outs
    assert_close(split_outs[0], plain, rtol=1e-5, atol=2e-6)
    for found in split_outs[1:]:
        assert torch.equal(found, split_outs[0])
