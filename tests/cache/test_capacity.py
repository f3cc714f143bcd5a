"""Row capacities: within the total, at least the minimum, stable while no request lacks pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse.cache import PoolSizes
from hisparse.cache.residency import RowCapacities
from hisparse.errors import CapacityError

Changes = list[tuple[int, int]]


def make(
    total: int = 400, *, rows: int = 2, low: int = 8, high: int = 150, n: int = 8
) -> RowCapacities:
    sizes = PoolSizes(
        num_slots=n + 1,
        device_pages=total + (n + 1) * rows,
        min_row_pages=low,
        max_row_pages=high,
        context_pages=high,
        staging_pages=1,
    )
    return RowCapacities(rows, sizes)


def fit(capacities: RowCapacities, needs: dict[int, int]) -> Changes:
    """The changed slots and their new capacities."""
    changed = capacities.fit(np.array([*needs], dtype=int), np.array([*needs.values()], dtype=int))
    return [(slot, int(capacities.held[slot])) for slot in changed.tolist()]


class Requests(RuleBasedStateMachine):
    """Requests begin, grow and end in any order, with plans in between."""

    TOTAL, ROWS, LOW, HIGH, NUM = 403, 2, 8, 150, 6

    def __init__(self) -> None:
        super().__init__()
        self.capacities, self.twin = (
            make(self.TOTAL, rows=self.ROWS, n=self.NUM) for _ in range(2)
        )
        self.needs: dict[int, int] = {}
        self.device: dict[int, int] = {}

    @rule(slot=st.integers(0, NUM - 1), need=st.integers(0, 300))
    def begin(self, slot: int, need: int) -> None:
        self.capacities.begin(slot)
        self.twin.begin(slot)
        self.needs.pop(slot, None)
        self.needs[slot] = need

    @rule(slot=st.integers(0, NUM - 1))
    def end(self, slot: int) -> None:
        self.capacities.end(slot)
        self.twin.end(slot)
        self.needs.pop(slot, None)

    @precondition(lambda self: self.needs)
    @rule(data=st.data(), growth=st.integers(0, 60))
    def grow(self, data: st.DataObject, growth: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.needs)))
        self.needs[slot] += growth

    @rule()
    def plan(self) -> None:
        changes = fit(self.capacities, self.needs)
        assert changes == fit(self.twin, self.needs)
        self.apply(changes)
        for slot, need in self.needs.items():
            capacity = self.capacities.held[slot]
            assert self.LOW <= capacity <= self.HIGH
            lacks = capacity < min(need, self.HIGH)
            if lacks:  # then all that is worth giving away has been given away
                spare = self.TOTAL // self.ROWS - sum(self.device.values())
                assert spare < len(self.needs)
                for other in self.needs:
                    beyond = self.capacities.held[other] - capacity
                    assert beyond <= 32 + self.needs[other] // 16
        if len(self.needs) == 1:
            assert self.capacities.held[[*self.needs]][0] >= min(self.HIGH, *self.needs.values())
        assert set(self.device) == set(self.needs)
        assert fit(self.capacities, self.needs) == []

    def apply(self, changes: Changes) -> None:
        grew = False
        for slot, capacity in changes:
            old = self.device.get(slot, 0)
            assert capacity != old
            grew |= capacity > old
            assert grew == (capacity > old), "a row shrinks after another has grown"
            self.device[slot] = capacity
            assert self.ROWS * sum(self.device.values()) <= self.TOTAL
        self.device = {slot: pages for slot, pages in self.device.items() if pages}

    @invariant()
    def agrees_with_what_was_told(self) -> None:
        for slot in range(self.NUM):
            assert self.capacities.held[slot] == self.device.get(slot, 0)
        assert set(self.capacities.live.nonzero()[0]) == set(self.needs)

    def teardown(self) -> None:
        for slot in self.capacities.live.nonzero()[0]:
            self.end(slot)
        self.plan()
        assert not self.capacities.held.any()


TestRequests = Requests.TestCase


def test_rows_shrink_when_others_arrive_and_grow_when_they_leave() -> None:
    capacities = make(high=200)
    capacities.begin(0)
    assert fit(capacities, {0: 200}) == [(0, 200)]
    capacities.begin(1)
    assert fit(capacities, {0: 200, 1: 200}) == [(0, 100), (1, 100)]
    capacities.begin(2)
    assert fit(capacities, {2: 10}) == [(0, 92), (1, 92), (2, 16)]
    capacities.end(1)
    assert capacities.held[1] == 92
    assert fit(capacities, {0: 200}) == [(1, 0), (0, 184)]


def test_decoding_changes_capacity_rarely() -> None:
    capacities = make(10_000, high=1000)
    capacities.begin(0)
    capacities.begin(1)
    plans = [fit(capacities, {0: need, 1: 2 * need}) for need in range(50, 300)]
    assert sum(map(bool, plans)) <= 30


def test_starved_rows_do_not_plan_anew_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities = make(128, n=8)
    for slot in range(8):
        capacities.begin(slot)
    fit(capacities, {slot: 900 for slot in range(8)})
    assert [capacities.held[slot] for slot in range(8)] == [8] * 8
    count = 0
    original = capacities._divide

    def counted() -> np.ndarray:
        nonlocal count
        count += 1
        return original()

    monkeypatch.setattr(capacities, "_divide", counted)
    for need in range(900, 1000):
        assert fit(capacities, {slot: need for slot in range(8)}) == []
    assert count == 0


def test_slot_reused_before_the_next_plan_keeps_its_pages() -> None:
    capacities = make()
    capacities.begin(0)
    fit(capacities, {0: 100})
    held = capacities.held[0]
    capacities.end(0)
    capacities.begin(0)
    assert fit(capacities, {0: 10}) == []
    assert capacities.held[0] == held
    capacities.begin(1)
    fit(capacities, {0: 10, 1: 500})
    assert capacities.held[1] == 150


def test_misuse() -> None:
    with pytest.raises(CapacityError, match=r"got 100 per layer, expected at least .*\(8\)"):
        make(100)
    with pytest.raises(CapacityError, match=r"got 7, expected at least min_row_pages \(8\)"):
        make(high=7)
    capacities = make(n=1)
    capacities.begin(0)
    capacities.begin(0)
    with pytest.raises(CapacityError, match=r"got 2 with request slot 1, .*max_requests \(1\)"):
        capacities.begin(1)
    capacities.end(1)
    assert fit(capacities, {0: 1}) == [(0, 16)]
