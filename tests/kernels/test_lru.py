"""``lru_diff``, ``promote_tail``, ``reset_rows`` and ``rebalance`` against an ``OrderedDict``."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.errors import KernelError
from hisparse.kernels import RowState, lru_diff, promote_tail, rebalance, reset_rows
from tests.kernels.lru_oracle import LruOracle


def i32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class World:
    """State rows and their oracles, for two layers that are driven alike."""

    num_rows: int
    slots: int
    rng: Random
    layers: int = 2
    oracles: list[LruOracle] = field(default_factory=list)

    def __post_init__(self) -> None:
        tables = (self.layers, self.num_rows, self.slots)
        self.states = RowState(*(torch.full(tables, -1, dtype=torch.int32) for _ in range(3)))
        self.capacity = torch.zeros(self.num_rows, dtype=torch.int32)
        self.tails = torch.arange(self.num_rows, dtype=torch.int32).repeat(self.layers, 1)
        self.num_pages = self.num_rows * self.slots
        first = self.num_rows
        self.free = torch.arange(first, first + self.num_pages, dtype=torch.int32)
        self.free = self.free.repeat(self.layers, 1)
        self.num_free = torch.full((self.layers,), self.num_pages, dtype=torch.int32)
        self.oracles = [LruOracle(0) for _ in range(self.num_rows)]

    def layer(self, layer: int) -> RowState:
        return RowState(*(t[layer] for t in self.states))

    def rebalance(self, rows: list[int], capacity: list[int]) -> None:
        rebalance(torch.tensor(rows), i32(capacity), self.capacity, self.states, self.free,
                  self.num_free)
        for row, new in zip(rows, capacity, strict=True):
            if new != len(self.oracles[row].slots):
                self.oracles[row].resize(new)

    def check(self) -> None:
        """Tables equal the oracles, and every device page has exactly one owner."""
        for layer in range(self.layers):
            state = self.layer(layer)
            owned = self.tails[layer].tolist()
            owned += self.free[layer, : self.num_free[layer]].tolist()
            for row, oracle in enumerate(self.oracles):
                n = len(oracle.slots)
                assert self.capacity[row] == n
                order = state.lru_order[row].tolist()
                assert order == [*oracle.slots, *[-1] * (self.slots - n)]
                held = state.slot_pages[row].tolist()
                expected = {s: -1 if p is None else p for s, p in oracle.slots.items()}
                assert held == [expected.get(s, -1) for s in range(self.slots)]
                assert state.device_pages[row, n:].tolist() == [-1] * (self.slots - n)
                owned += state.device_pages[row, :n].tolist()
            assert sorted(owned) == list(range(self.num_rows + self.num_pages))


def test_the_worked_example_of_the_design() -> None:
    state = RowState(i32([[1, 9, 7, 4]]), i32([[2, 0, 3, 1]]), i32([[10, 11, 12, 13]]))
    table = i32([[page + 100 for page in range(10)]])
    diff = lru_diff(i32([[4, 5, 9, 4, -1]]), table, i32([4]), i32([1]), state)
    assert diff.curr_device_slots.tolist() == [[3, 2, 1, 3, -1]]
    assert diff.load_host_pages.tolist() == [[105, -1, -1, -1, -1]]
    assert diff.load_device_slots.tolist() == [[2, -1, -1, -1, -1]]
    assert (diff.num_hits.tolist(), diff.num_misses.tolist()) == ([2], [1])
    assert state.lru_order.tolist() == [[0, 2, 3, 1]]
    assert state.slot_pages.tolist() == [[1, 9, 5, 4]]


def lru_step(world: World, layer: int, rows: list[int], padded: int, shared: int) -> None:
    """A step of ``rows`` in groups of ``shared`` that use one table row, with padding behind."""
    rng = world.rng
    width = rng.randint(1, world.slots + 2)
    num_pages = rng.randint(world.slots, 3 * world.slots)
    total = len(rows) + padded
    while total % shared:
        padded, total = padded + 1, total + 1
    table = [rng.sample(range(500), num_pages) for _ in range(total // shared)]
    selection = []
    for r in range(total):
        capacity = len(world.oracles[rows[r]].slots) if r < len(rows) else world.slots
        pool = rng.sample(range(num_pages), min(capacity, num_pages)) + [-1]
        selection.append([rng.choice(pool) for _ in range(width)])
    state_rows = rows + [rng.choice([*rows, 0]) for _ in range(padded)]
    before = [t.clone() for t in world.layer(layer)]
    diff = lru_diff(
        i32(selection), i32(table), world.capacity[state_rows], i32([len(rows)]),
        world.layer(layer), rows=torch.tensor(state_rows),
    )
    pad = [-1] * width
    for r, row in enumerate(rows):
        expected = world.oracles[row].step(selection[r], table[r // shared])
        assert diff.curr_device_slots[r].tolist() == expected["current"]
        assert diff.load_host_pages[r].tolist() == (expected["load_host"] + pad)[:width]
        assert diff.load_device_slots[r].tolist() == (expected["load_slots"] + pad)[:width]
        assert diff.num_hits[r] == expected["hits"]
        assert diff.num_misses[r] == expected["misses"]
    for r in range(len(rows), total):
        assert diff.curr_device_slots[r].tolist() == diff.load_host_pages[r].tolist() == pad
        assert diff.num_hits[r] == diff.num_misses[r] == 0
    for now, then in zip(world.layer(layer), before, strict=True):
        for row in set(range(world.num_rows)) - set(rows):
            assert torch.equal(now[row], then[row])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 9))
def test_any_trace_agrees_with_an_ordered_dict(seed: int, num_rows: int, slots: int) -> None:
    """Steps, row reuse, capacity changes and full tail pages, in any order."""
    rng = Random(seed)
    world = World(num_rows, slots, rng)
    world.rebalance(list(range(num_rows)), [rng.randint(0, slots) for _ in range(num_rows)])
    for _ in range(12):
        rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
        action = rng.choice(["step", "step", "step", "reset", "rebalance", "promote"])
        if action == "step":
            state, shared = rng.getstate(), rng.choice([1, 2, 3])
            copies = [LruOracle(0) for _ in world.oracles]
            for copy, oracle in zip(copies, world.oracles, strict=True):
                copy.slots = oracle.slots.copy()
            padded = rng.randint(0, 2)
            state = rng.getstate()
            lru_step(world, 0, rows, padded, shared)
            world.oracles = copies
            rng.setstate(state)
            lru_step(world, 1, rows, padded, shared)
        elif action == "reset":
            reset_rows(torch.tensor(rows), world.capacity, world.states)
            for row in rows:
                world.oracles[row].reset()
        elif action == "rebalance":
            world.rebalance(rows, [rng.randint(0, slots) for _ in rows])
        else:
            promote(world, rows)
        world.check()


def promote(world: World, rows: list[int]) -> None:
    filled = [world.rng.random() < 0.7 for _ in rows]
    pages = [world.rng.randint(1000, 2000) for _ in rows]
    expected = {}
    for row, full, page in zip(rows, filled, pages, strict=True):
        if full and world.oracles[row].slots:
            expected[row] = world.oracles[row].promote(page)
    for layer in range(world.layers):
        state, tails = world.layer(layer), world.tails[layer]
        before = {row: (tails[row].item(), state.device_pages[row, slot].item())
                  for row, slot in expected.items()}
        promote_tail(torch.tensor(rows), i32(pages), torch.tensor(filled), world.capacity[rows],
                     state, tails)
        for row, slot in expected.items():
            assert (state.device_pages[row, slot].item(), tails[row].item()) == before[row]


def test_shrinks_come_before_grows_and_pages_pass_through_the_free_stack() -> None:
    world = World(3, 4, Random(0), layers=1)
    world.rebalance([0, 1, 2], [4, 4, 4])
    assert world.num_free.tolist() == [0]
    with pytest.raises(KernelError, match="got 4 to 5, expected 0 to 4"):
        world.rebalance([0, 1], [4, 5])
    dropped = world.states.device_pages[0, 2, :3].tolist()
    world.rebalance([0, 1, 2], [4, 4, 1])
    assert world.free[0, :3].tolist() == dropped
    world.rebalance([1, 0], [2, 4])
    world.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"selection": torch.zeros(2, 3)}, "selection: got dtype torch.float32",
                     id="dtype"),
        pytest.param({"capacity": i32([4])}, r"capacity: got shape \[1\], expected \[2\]",
                     id="shape"),
        pytest.param({"host_page_table": i32([[0] * 5] * 3)}, "host_page_table: got 3 rows",
                     id="table"),
    ],
)
def test_bad_tensors_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "selection": i32([[0, 1, 2], [2, 1, 0]]),
        "host_page_table": i32([[0] * 5] * 2),
        "capacity": i32([4, 4]),
        "num_real_rows": i32([2]),
        "state": RowState(*(torch.zeros(2, 4, dtype=torch.int32) for _ in range(3))),
    } | change
    with pytest.raises(KernelError, match=message):
        lru_diff(**arguments)
