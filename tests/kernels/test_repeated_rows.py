"""``diff_tables`` of requests with the same state rows: one call is as many calls in that order."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.kernels.world import diff_slots, empty_state, i32

SLOTS, PAGES, HEADS = 24, 40, 3


def random_selection(rng: Random, rows: int) -> torch.Tensor:
    """``[rows, 8]``, some entries -1."""
    chosen = [rng.sample(range(PAGES), 8) for _ in range(rows)]
    return i32([[page if rng.random() < 0.8 else -1 for page in pages] for pages in chosen])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_the_same_rows_are_served_in_order(impl: str, seed: int) -> None:
    rng = Random(seed)
    # Slots 4, 1 and 2, of which the first and the last have several tokens; one is padding.
    slots = [4, 4, 4, 1, 2, 2, 0]
    rows = (torch.tensor(slots)[:, None] * HEADS + torch.arange(HEADS)).flatten()
    count = len(rows)
    order = torch.arange(SLOTS, dtype=torch.int32).repeat(5 * HEADS, 1)
    once, many = (empty_state(order.clone(), order.clone(), PAGES) for _ in range(2))
    capacity, real = i32([SLOTS] * count), i32([count - HEADS])
    table = i32([rng.sample(range(500), PAGES) for _ in slots])
    for _ in range(4):
        selection = random_selection(rng, count)
        found = diff_slots(selection, table, capacity, real, once, rows=rows, impl=impl)
        for request in range(len(slots) - 1):
            some = slice(request * HEADS, (request + 1) * HEADS)
            expected = diff_slots(
                selection[some],
                table[request : request + 1],
                capacity[some],
                i32([HEADS]),
                many,
                rows=rows[some],
                impl=impl,
            )
            for name, a, b in zip(found._fields, found, expected, strict=True):
                assert torch.equal(a[some], b), (request, name)
        assert (found.slots[-HEADS:] == -1).all()
        for a, b in zip(once[:3], many[:3], strict=True):
            assert torch.equal(a, b)
