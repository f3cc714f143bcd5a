"""Real state rows beside their ``OrderedDict`` oracles, driven by random traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch

from hisparse.kernels import LruDiff, RowState, lru_diff, promote_tail, rebalance, reset_rows
from tests.kernels.lru_oracle import LruOracle

__all__ = ["World", "empty_state", "i32", "indexed"]

#: Pages of the index of each row.
INDEXED = 5000


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

    def step(self, layer: int, num_pages: int, padded: int, shared: int) -> LruDiff:
        """One ``lru_diff`` of some rows, in groups of ``shared`` that use one table row."""
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
        diff = lru_diff(
            i32(selection),
            i32(table),
            self.capacity[state_rows],
            i32([len(rows)]),
            self.layer(layer),
            rows=torch.tensor(state_rows),
            impl=self.impl,
        )
        pad = [-1] * width
        for r, row in enumerate(rows):
            want = self.oracles[layer][row].step(selection[r], table[r // shared])
            got = {name: tensor[r].tolist() for name, tensor in diff._asdict().items()}
            assert got == {
                "curr_device_slots": want["current"],
                "load_host_pages": [*want["load_host"], *pad][:width],
                "load_device_slots": [*want["load_slots"], *pad][:width],
                "num_hits": want["hits"],
                "num_misses": want["misses"],
            }
        for r in range(len(rows), total):
            assert [t[r].tolist() for t in diff] == [pad, pad, pad, 0, 0]
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
