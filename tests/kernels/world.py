"""Real state rows beside their ``OrderedDict`` oracles, driven by random traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import torch

from hisparse.kernels import DecodeRows, RowState, diff_tables, promote_tail, rebalance, reset_rows
from hisparse.types import Selection
from tests.kernels.lru_oracle import LruOracle

__all__ = [
    "Diff", "World", "diff_slots", "empty_state", "full_state", "i32", "indexed", "wide_trace",
]  # fmt: skip

#: Pages of the index of each row.
INDEXED = 5000
#: The tail page of every row, which no slot holds.
TAIL = 2**30


def i32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indexed(slot_pages: torch.Tensor, lru_order: torch.Tensor, *more: torch.Tensor) -> RowState:
    """Tables whose index is right for resident pages, and random elsewhere, as it may be."""
    generator = torch.Generator().manual_seed(0)
    shape = (*slot_pages.shape[:-1], INDEXED)
    page_slots = torch.randint(-9, 99, shape, dtype=torch.int32, generator=generator)
    for at in (slot_pages >= 0).nonzero().tolist():
        page = int(slot_pages[tuple(at)])
        if page < INDEXED:
            page_slots[(*at[:-1], page)] = at[-1]
    device_pages = more[0] if more else lru_order.clone()
    return RowState(slot_pages, lru_order, device_pages, page_slots)


def empty_state(lru_order: torch.Tensor, device_pages: torch.Tensor, num_pages: int) -> RowState:
    """Tables of rows whose slots are all empty; the longest sequence has ``num_pages``."""
    page_slots = lru_order.new_full((len(lru_order), num_pages), -1)
    return RowState(torch.full_like(lru_order, -1), lru_order, device_pages, page_slots)


class Diff(NamedTuple):
    """What ``diff_tables`` finds, by row-local slot; int32, -1 padded."""

    slots: torch.Tensor  # [R, K], of each selected page
    load_host_pages: torch.Tensor  # [R, K]
    load_slots: torch.Tensor  # [R, K]
    num_hits: torch.Tensor  # [R]
    num_misses: torch.Tensor  # [R]
    away: torch.Tensor  # [R]


def diff_slots(
    selection: torch.Tensor,
    table: torch.Tensor,
    capacity: torch.Tensor,
    num_real_rows: torch.Tensor,
    state: RowState,
    *,
    rows: torch.Tensor | None = None,
    waits: bool = True,
    impl: str,
) -> Diff:
    """``diff_tables`` of selections with -1 and duplicates anywhere, by the slots of its pages.

    ``rows``: the first state rows if None. Every request has as many pages as ``table``.
    """
    count = len(selection)
    rows = torch.arange(count) if rows is None else rows
    limits = i32([table.shape[1]] * len(table))
    # A row attends its tail page at the entry `lengths`: the first without a page.
    lengths = (selection >= 0).int().cumprod(1).sum(1).int()
    tails = i32([TAIL] * count)
    step = DecodeRows(rows, capacity, num_real_rows, table, limits, tails, i32([1] * count))
    chosen = Selection(selection, lengths)
    found = diff_tables(chosen, step, state, page_size=16, waits=waits, impl=impl)
    served = (torch.arange(count) < num_real_rows) & (found.num_misses >= 0)
    # Of a row with a gap before its length, only C++ says where the tail page is.
    at_length = found.attended.gather(1, (found.seq_lens[:, None] // 16).long())[:, 0]
    assert (at_length == TAIL)[served].all()
    pages = found.attended[:, :-1].masked_fill(found.attended[:, :-1] == TAIL, -1)
    own = state.device_pages[rows.clamp(0, len(state.device_pages) - 1)]
    away = i32([0] * count) if found.away is None else found.away
    loads = _slots(own, found.loads)
    return Diff(_slots(own, pages), found.load_host_pages, loads, *found[4:6], away)


def _slots(device_pages: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """``[R, K] int32``, slot of each of ``pages [R, K]``, -1 for -1; ``device_pages [R, C]``."""
    if not pages.numel():
        return pages
    same = pages[:, :, None] == device_pages[:, None]
    assert same.any(2)[pages >= 0].all()
    return same.int().argmax(2).int().masked_fill(pages < 0, -1)


def full_state(rows: int, slots: int, capacity: int) -> RowState:
    """Tables of empty slots, of which each row has ``capacity``."""
    order = torch.arange(slots, dtype=torch.int32).repeat(rows, 1)
    order[:, capacity:] = -1
    return indexed(torch.full_like(order, -1), order)


def wide_trace(impl: str, steps: int, width: int, slots: int, num_pages: int) -> list[torch.Tensor]:
    """Tables of each step; every other selection is ascending, as those of the engine are."""
    generator = torch.Generator().manual_seed(0)
    state, results = full_state(2, slots, slots - 3), []
    for step in range(steps):
        chosen = [torch.randperm(num_pages, generator=generator)[:width] for _ in range(2)]
        if step % 2:
            chosen = [pages.sort().values for pages in chosen]
        table = torch.randperm(num_pages, generator=generator).int().repeat(2, 1)
        diff = diff_slots(
            torch.stack(chosen).int(), table, i32([slots - 3] * 2), i32([2]), state, impl=impl
        )
        results += [t.clone() for t in (*diff, *state[:3])]
    return results


@dataclass
class World:
    """Rows of ``layers`` layers; ``oracles[layer][row]`` says what the tables must hold."""

    num_rows: int
    slots: int
    rng: Random
    impl: str
    layers: int = 1
    oracles: list[list[LruOracle]] = field(init=False)

    def __post_init__(self) -> None:
        tables = (self.layers, self.num_rows, self.slots)
        self.states = indexed(*(torch.full(tables, -1, dtype=torch.int32) for _ in range(3)))
        self.capacity = torch.zeros(self.num_rows, dtype=torch.int32)
        self.num_pages = self.num_rows * (self.slots + 1)
        ids = torch.arange(self.num_pages, dtype=torch.int32).repeat(self.layers, 1)
        self.tails, self.free = ids[:, : self.num_rows].clone(), ids[:, self.num_rows :].clone()
        self.num_free = torch.full((self.layers,), self.free.shape[1], dtype=torch.int32)
        self.oracles = [[LruOracle(0) for _ in range(self.num_rows)] for _ in range(self.layers)]

    def layer(self, layer: int) -> RowState:
        return self.states.layer(layer)

    def capacity_of(self, row: int) -> int:
        return len(self.oracles[0][row].slots)

    def some_rows(self) -> list[int]:
        return self.rng.sample(range(self.num_rows), self.rng.randint(1, self.num_rows))

    def resize(self, rows: list[int], capacity: list[int]) -> None:
        rebalance(
            torch.tensor(rows, dtype=torch.int64),
            i32(capacity),
            self.capacity,
            self.states,
            self.free,
            self.num_free,
            impl=self.impl,
        )
        for oracles in self.oracles:
            for row, new in zip(rows, capacity, strict=True):
                if new != len(oracles[row].slots):
                    oracles[row].resize(new)

    def reset(self, rows: list[int]) -> None:
        reset_rows(torch.tensor(rows), self.capacity, self.states, impl=self.impl)
        for oracles in self.oracles:
            for row in rows:
                oracles[row].reset()

    def promote(self, rows: list[int], page: int) -> None:
        """Some of the rows' tail pages fill; checks that the device pages are exchanged."""
        filled = [self.rng.random() < 0.7 for _ in rows]
        pages = list(range(page, page + len(rows)))
        for layer in range(self.layers):
            state, tails = self.layer(layer), self.tails[layer]
            devices, old_tails = state.device_pages.clone(), tails.clone()
            promote_tail(
                torch.tensor(rows),
                i32(pages),
                torch.tensor(filled),
                self.capacity[rows],
                state,
                tails,
                impl=self.impl,
            )
            for row, full, index in zip(rows, filled, pages, strict=True):
                if full and self.capacity_of(row):
                    slot = self.oracles[layer][row].promote(index)
                    devices[row, slot], old_tails[row] = old_tails[row], devices[row, slot].clone()
            assert torch.equal(state.device_pages, devices)
            assert torch.equal(tails, old_tails)

    def step(self, layer: int, num_pages: int, padded: int, shared: int) -> Diff:
        """One ``diff_tables`` of some rows, in groups of ``shared`` that use one table row."""
        rng, rows = self.rng, self.some_rows()
        padded += -(len(rows) + padded) % shared
        total, width = len(rows) + padded, rng.randint(1, self.slots)
        table = [rng.sample(range(10_000), num_pages) for _ in range(total // shared)]
        selection = []
        for r in range(total):
            room = self.capacity_of(rows[r]) if r < len(rows) else self.slots
            pool = [*rng.sample(range(num_pages), min(room, num_pages)), -1]
            selection.append([rng.choice(pool) for _ in range(width)])
        state_rows = rows + [rng.choice([*rows, 0]) for _ in range(padded)]
        waits = rng.random() < 0.6
        diff = diff_slots(
            i32(selection),
            i32(table),
            self.capacity[state_rows],
            i32([len(rows)]),
            self.layer(layer),
            rows=torch.tensor(state_rows),
            waits=waits,
            impl=self.impl,
        )
        pad = [-1] * width
        for r, row in enumerate(rows):
            want = self.oracles[layer][row].step(selection[r], table[r // shared], waits=waits)
            got = {name: tensor[r].tolist() for name, tensor in diff._asdict().items()}
            assert got == {
                "slots": [*want["current"], *pad][:width],
                "load_host_pages": [*want["load_host"], *pad][:width],
                "load_slots": [*want["load_slots"], *pad][:width],
                "num_hits": want["hits"],
                "num_misses": want["misses"],
                "away": want["away"],
            }
        for r in range(len(rows), total):
            assert [t[r].tolist() for t in diff] == [pad, pad, pad, 0, 0, 0]
        return diff

    def check(self) -> None:
        """Tables equal the oracles, and every device page has exactly one owner."""
        for layer, oracles in enumerate(self.oracles):
            state = self.layer(layer)
            owned = self.tails[layer].tolist()
            owned += self.free[layer, : self.num_free[layer]].tolist()
            for row, oracle in enumerate(oracles):
                n = len(oracle.slots)
                pad = [-1] * (self.slots - n)
                assert self.capacity[row] == n
                assert state.lru_order[row].tolist() == [*oracle.slots, *pad]
                held = [oracle.slots[slot] for slot in range(n)]
                assert state.slot_pages[row].tolist() == [
                    *(-1 if page is None else page for page in held),
                    *pad,
                ]
                assert state.device_pages[row, n:].tolist() == pad
                owned += state.device_pages[row, :n].tolist()
            assert sorted(owned) == list(range(self.num_pages))
