"""``lru_diff`` against an ``OrderedDict``, on its worked example, at its edges, on bad input."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.errors import KernelError
from hisparse.kernels import RowState, lru_diff
from tests.kernels.world import World, i32, indexed
from tests.sizes import sized


def example() -> RowState:
    """Capacity 4 of 6, order (cold to hot) slots 2:p7, 0:p1, 3:p4, 1:p9."""
    return indexed(
        i32([[1, 9, 7, 4, -1, -1]]), i32([[2, 0, 3, 1, -1, -1]]), i32([[10, 11, 12, 13, -1, -1]])
    )


TABLE = i32([[page + 100 for page in range(10)]])


def test_the_worked_example_of_the_design(impl: str) -> None:
    state = example()
    diff = lru_diff(i32([[4, 5, 9, 4, -1]]), TABLE, i32([4]), i32([1]), state, impl=impl)
    assert diff.curr_device_slots.tolist() == [[3, 2, 1, 3, -1]]
    assert diff.load_host_pages.tolist() == [[105, -1, -1, -1, -1]]
    assert diff.load_device_slots.tolist() == [[2, -1, -1, -1, -1]]
    assert (diff.num_hits.tolist(), diff.num_misses.tolist()) == ([2], [1])
    assert state.lru_order.tolist() == [[0, 2, 3, 1, -1, -1]]
    assert state.slot_pages.tolist() == [[1, 9, 5, 4, -1, -1]]
    assert state.device_pages.tolist() == [[10, 11, 12, 13, -1, -1]]


def test_more_pages_than_slots_are_refused_before_anything_changes(impl: str) -> None:
    state = example()
    with pytest.raises((KernelError, RuntimeError)):
        lru_diff(i32([[4, 5, 9, 3, 2]]), TABLE, i32([4]), i32([1]), state, impl=impl)
    assert [t.tolist() for t in state[:3]] == [t.tolist() for t in example()[:3]]


def test_a_page_that_the_request_does_not_have_is_not_loaded(impl: str) -> None:
    """The table is as wide as the longest request needs: behind a shorter one are others' pages."""
    state, limit = example(), i32([6])
    args = (TABLE, i32([4]), i32([1]), state)
    if impl == "reference":
        diff = lru_diff(i32([[4, 6]]), *args, num_pages=limit, impl=impl)
        assert (diff.num_hits.tolist(), diff.num_misses.tolist()) == ([0], [-1])
    else:
        with pytest.raises(KernelError, match="selection: "):
            lru_diff(i32([[4, 6]]), *args, num_pages=limit, impl=impl)
    assert [t.tolist() for t in state[:3]] == [t.tolist() for t in example()[:3]]
    diff = lru_diff(i32([[4, 5]]), *args, num_pages=limit, impl=impl)
    assert (diff.num_hits.tolist(), diff.num_misses.tolist()) == ([1], [1])


def test_each_request_has_its_own_number_of_pages(impl: str) -> None:
    """Two rows a request; the second request has fewer pages than the table has columns."""
    state = indexed(*(t.repeat(4, 1) for t in example()[:3]))
    table, limits, selection = (
        TABLE.repeat(2, 1),
        i32([10, 5]),
        i32([[9, 8], [9, 1], [3, 4], [0, 4]]),
    )
    real, capacity = i32([4]), i32([4] * 4)
    diff = lru_diff(selection, table, capacity, real, state, num_pages=limits, impl=impl)
    assert (diff.num_hits + diff.num_misses).tolist() == [2, 2, 2, 2]


@settings(max_examples=sized(30, 240), deadline=None)
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


def test_rows_default_to_the_first_state_rows(impl: str) -> None:
    world = World(3, 4, Random(0), impl)
    world.resize([0, 1, 2], [4, 4, 4])
    diff = lru_diff(i32([[5, 6], [7, -1]]), TABLE, i32([4, 4]), i32([2]), world.layer(0), impl=impl)
    assert diff.num_misses.tolist() == [2, 1]
    assert world.states.slot_pages[0].tolist() == [[5, 6, -1, -1], [7, -1, -1, -1], [-1] * 4]


def test_pages_held_beyond_the_table_are_evicted_like_others(impl: str) -> None:
    """A batch's table is as wide as its own contexts; a row may hold pages from before."""
    world = World(1, 20, Random(2), impl)
    world.resize([0], [20])
    table = [list(range(100, 110))]
    world.states.slot_pages[0, 0, :18] = 2**30 + torch.arange(18, dtype=torch.int32)
    for slot in range(18):
        world.oracles[0][0].slots[slot] = 2**30 + slot
    for pages in ([3, 4, 9], [9, 2, 3]):
        diff = lru_diff(
            i32([pages]), i32(table), world.capacity, i32([1]), world.layer(0), impl=impl
        )
        expected = world.oracles[0][0].step(pages, table[0])
        assert diff.curr_device_slots[0].tolist() == expected["current"]
        world.check()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other elements in between, in every dimension."""
    apart = torch.full([2 * n for n in tensor.shape], 3).to(tensor.dtype)
    view = apart[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def test_inputs_may_be_strided(impl: str) -> None:
    inputs = (i32([[4, 5, 9], [2, -1, 2]]), i32([range(50, 60)]), i32([4, 3]), i32([2]))
    results = []
    for change in (torch.clone, strided):
        world = World(2, 4, Random(0), impl)
        world.resize([0, 1], [3, 4])
        diff = lru_diff(
            *map(change, inputs), world.layer(0), rows=change(torch.tensor([1, 0])), impl=impl
        )
        results.append([t.tolist() for t in (*diff, *world.states[:3])])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("num_rows", "width"), [(0, 3), (2, 0)], ids=["no-rows", "nothing-selected"]
)
def test_empty_input_changes_nothing(impl: str, num_rows: int, width: int) -> None:
    world = World(2, 4, Random(1), impl)
    world.resize([0, 1], [4, 3])
    diff = lru_diff(
        torch.zeros((num_rows, width), dtype=torch.int32),
        torch.zeros((num_rows, 5), dtype=torch.int32),
        world.capacity[:num_rows],
        i32([num_rows]),
        world.layer(0),
        impl=impl,
    )
    assert diff.curr_device_slots.shape == (num_rows, width)
    assert diff.num_misses.tolist() == [0] * num_rows
    world.check()


def test_padding_alone_changes_nothing(impl: str) -> None:
    """All rows padded, and all of them name one state row."""
    state = example()
    diff = lru_diff(
        i32([[4, 5], [6, 7]]),
        TABLE,
        i32([4, 4]),
        i32([0]),
        state,
        rows=torch.tensor([0, 0]),
        impl=impl,
    )
    assert [t.tolist() for t in diff] == [[[-1, -1]] * 2] * 3 + [[0, 0]] * 2
    assert [t.tolist() for t in state[:3]] == [t.tolist() for t in example()[:3]]
