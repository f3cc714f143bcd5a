"""Row capacities: within the total, at least the minimum, stable while no request lacks pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse.cache.capacity import RowCapacities
from hisparse.errors import CapacityError, HiSparseError

Changes = list[tuple[int, int]]


def make(
    total: int = 400, *, rows: int = 2, low: int = 8, high: int = 150, n: int = 8
) -> RowCapacities:
    return RowCapacities(total, rows, low, high, n)


class Requests(RuleBasedStateMachine):
    """Requests begin, grow and end in any order, with plans in between."""

    TOTAL, ROWS, LOW, HIGH, NUM = 403, 2, 8, 150, 6

    def __init__(self) -> None:
        super().__init__()
        self.capacities, self.twin = (
            RowCapacities(self.TOTAL, self.ROWS, self.LOW, self.HIGH, self.NUM) for _ in range(2)
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
        changes = self.capacities.fit(self.needs)
        assert changes == self.twin.fit(self.needs)
        self.apply(changes)
        for slot, need in self.needs.items():
            capacity = self.capacities.capacity(slot)
            assert self.LOW <= capacity <= self.HIGH
            lacks = capacity < min(need, self.HIGH)
            if lacks:  # then all that is worth giving away has been given away
                spare = self.TOTAL // self.ROWS - sum(self.device.values())
                assert spare < len(self.needs)
                for other in self.needs:
                    beyond = self.capacities.capacity(other) - capacity
                    assert beyond <= 32 + self.needs[other] // 16
        if len(self.needs) == 1:
            assert self.capacities.capacity(*self.needs) >= min(self.HIGH, *self.needs.values())
        assert set(self.device) == set(self.needs)
        assert self.capacities.fit(self.needs) == []

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
            assert self.capacities.capacity(slot) == self.device.get(slot, 0)
        assert set(self.capacities.live) == set(self.needs)

    def teardown(self) -> None:
        for slot in self.capacities.live:
            self.end(slot)
        self.plan()
        assert not any(map(self.capacities.capacity, range(self.NUM)))


TestRequests = Requests.TestCase


@given(need=st.integers(0, 1000), high=st.integers(8, 200))
def test_lone_request_gets_what_it_needs(need: int, high: int) -> None:
    capacities = make(high=high)
    capacities.begin(3)
    capacities.fit({3: need})
    assert capacities.capacity(3) >= min(need, high, 200)
    assert capacities.capacity(3) >= 8


def test_rows_shrink_when_others_arrive_and_grow_when_they_leave() -> None:
    capacities = make(high=200)
    capacities.begin(0)
    assert capacities.fit({0: 200}) == [(0, 200)]
    capacities.begin(1)
    assert capacities.fit({0: 200, 1: 200}) == [(0, 100), (1, 100)]
    capacities.begin(2)
    assert capacities.fit({2: 10}) == [(0, 92), (1, 92), (2, 16)]
    capacities.end(1)
    assert capacities.capacity(1) == 92
    assert capacities.fit({0: 200}) == [(1, 0), (0, 184)]


def test_a_full_house_has_the_least_each() -> None:
    capacities = make(128, n=8)
    for slot in range(8):
        capacities.begin(slot)
    capacities.fit({slot: 1000 for slot in range(8)})
    assert [capacities.capacity(slot) for slot in range(8)] == [8] * 8


def test_decoding_changes_capacity_rarely() -> None:
    capacities = make(10_000, high=1000)
    capacities.begin(0)
    capacities.begin(1)
    plans = [capacities.fit({0: need, 1: 2 * need}) for need in range(50, 300)]
    assert sum(map(bool, plans)) <= 30


def test_starved_rows_do_not_plan_anew_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities = make(128, n=8)
    for slot in range(8):
        capacities.begin(slot)
    capacities.fit({slot: 900 for slot in range(8)})
    count = 0
    original = capacities._rebalance

    def counted() -> Changes:
        nonlocal count
        count += 1
        return original()

    monkeypatch.setattr(capacities, "_rebalance", counted)
    for need in range(900, 1000):
        assert capacities.fit({slot: need for slot in range(8)}) == []
    assert count == 0


def test_slot_reused_before_the_next_plan_keeps_its_pages() -> None:
    capacities = make()
    capacities.begin(0)
    capacities.fit({0: 100})
    held = capacities.capacity(0)
    capacities.end(0)
    capacities.begin(0)
    assert capacities.fit({0: 10}) == []
    assert capacities.capacity(0) == held
    capacities.begin(1)
    capacities.fit({0: 10, 1: 500})
    assert capacities.capacity(1) == 150


def test_misuse() -> None:
    with pytest.raises(CapacityError, match=r"got 100 per layer, expected at least .*\(8\)"):
        make(100)
    with pytest.raises(CapacityError, match=r"max_pages: got 7, expected at least min_pages \(8\)"):
        make(high=7)
    capacities = make(n=1)
    capacities.begin(0)
    capacities.begin(0)
    with pytest.raises(CapacityError, match=r"got 2 with request slot 1, .*max_requests \(1\)"):
        capacities.begin(1)
    with pytest.raises(HiSparseError, match="slot 1: got a need of 5 pages, expected begin"):
        capacities.fit({1: 5})
    capacities.end(7)
    assert capacities.fit({0: 1}) == [(0, 16)]
