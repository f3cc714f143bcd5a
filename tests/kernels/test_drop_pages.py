"""``drop_pages`` against lists: which slots become empty, and the order of the others."""

from __future__ import annotations

import pytest
import torch

from hisparse.kernels import RowState, drop_pages


def make_states(layers: int, rows: int, slots: int) -> tuple[RowState, list[int]]:
    """Random tables; rows have different capacities, and some slots are empty."""
    rng = torch.Generator().manual_seed(slots)
    states = RowState(*(torch.full((layers, rows, slots), -1, dtype=torch.int32) for _ in range(3)))
    capacity = [slots, *torch.randint(0, slots + 1, (rows - 1,), generator=rng).tolist()]
    for layer in range(layers):
        for row, held in enumerate(capacity):
            pages = torch.randperm(2 * slots, generator=rng)[:held]
            pages[torch.rand(held, generator=rng) < 0.2] = -1
            states.slot_pages[layer, row, :held] = pages.int()
            states.lru_order[layer, row, :held] = torch.randperm(held, generator=rng).int()
            states.device_pages[layer, row, :held] = torch.arange(held).int()
    return states, capacity


@pytest.mark.parametrize("slots", [1, 7, 64])
def test_stale_pages_leave_and_their_slots_become_the_coldest(slots: int) -> None:
    states, capacity = make_states(layers=2, rows=4, slots=slots)
    stale = torch.rand(slots + 3, generator=torch.Generator().manual_seed(1)) < 0.4
    dropped = set(stale.nonzero().flatten().tolist())
    expected = [x.clone() for x in states[:3]]
    for layer in range(2):
        for row in (3, 1):
            pages, order = (x[layer, row, : capacity[row]].tolist() for x in states[:2])
            pages = [-1 if page in dropped else page for page in pages]
            order.sort(key=lambda slot, pages=pages: pages[slot] >= 0)
            for table, values in zip(expected, (pages, order), strict=False):
                table[layer, row, : capacity[row]] = torch.tensor(values)
    drop_pages(torch.tensor([3, 1]), stale, states)
    for name, got, wanted in zip(states._fields, states, expected, strict=False):
        assert torch.equal(got, wanted), name
