"""The order of ``diff_tables`` against an ``OrderedDict``."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.world import World, diff_slots, i32
from tests.sizes import sized


@settings(max_examples=sized(30, 90), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 6), slots=st.integers(1, 9))
def test_any_trace_agrees_with_an_ordered_dict(
    impl: str, seed: int, num_rows: int, slots: int
) -> None:
    """Contexts grow; rows are reused, resized and take in their tails; steps between all that."""
    rng = Random(seed)
    world = World(num_rows, slots, rng, impl, layers=2)
    world.resize(list(range(num_rows)), [rng.randint(0, slots) for _ in range(num_rows)])
    num_pages = rng.randint(1, 2 * slots)
    for _ in range(12):
        action = rng.choice(["step", "step", "step", "reset", "resize", "promote"])
        if action == "step":
            for layer in range(world.layers):
                world.step(layer, num_pages, padded=rng.randint(0, 2), shared=rng.choice([1, 2, 3]))
        elif action == "reset":
            world.reset(world.some_rows())
        elif action == "resize":
            rows = world.some_rows()
            world.resize(rows, [rng.randint(0, slots) for _ in rows])
        else:
            world.promote(world.some_rows(), num_pages)
            num_pages += num_rows
        world.check()


@pytest.mark.parametrize("slots", [63, 64, 500], ids=lambda n: f"slots{n}")
def test_wide_rows_agree_too(impl: str, slots: int) -> None:
    """Sizes around and beyond vector widths, with rows that are full."""
    world = World(3, slots, Random(slots), impl)
    world.resize([0, 1, 2], [slots, slots - 1, slots // 2])
    for step in range(12):
        world.step(0, slots + 40 * step + 1, padded=1, shared=2)
        world.check()


def test_pages_held_beyond_the_table_are_evicted_like_others(impl: str) -> None:
    """A batch's table is as wide as its own contexts; a row may hold pages from before."""
    world = World(1, 20, Random(2), impl)
    world.resize([0], [20])
    table = [list(range(100, 110))]
    world.states.slot_pages[0, 0, :18] = 2**30 + torch.arange(18, dtype=torch.int32)
    for slot in range(18):
        world.oracles[0][0].slots[slot] = 2**30 + slot
    for pages in ([3, 4, 9], [9, 2, 3]):
        diff = diff_slots(
            i32([pages]), i32(table), world.capacity, i32([1]), world.layer(0), impl=impl
        )
        expected = world.oracles[0][0].step(pages, table[0])
        assert diff.slots[0].tolist() == expected["current"]
        world.check()
