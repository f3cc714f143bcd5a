"""``rebalance``: plans that do not fit, and many rows; ``test_lru.py`` has it in random traces."""

from __future__ import annotations

from random import Random

import pytest
import torch

from hisparse.errors import KernelError
from hisparse.kernels import RowState, operation, rebalance, reset_rows, verify_capacity
from hisparse.kernels.operation import IMPLEMENTATIONS
from hisparse.kernels.rows import op
from tests.kernels.world import World, i32


def filled_world(impl: str, capacity: list[int]) -> World:
    """Rows that have been through a few steps, so that slots and order differ."""
    world = World(len(capacity), 4, Random(3), impl, layers=2)
    world.resize(list(range(len(capacity))), capacity)
    for _ in range(4):
        for layer in range(world.layers):
            world.step(layer, 12, padded=0, shared=1)
    world.check()
    return world


def test_no_rows_is_nothing_to_do(impl: str) -> None:
    world = filled_world(impl, [4, 3])
    world.resize([], [])
    world.check()


def change(world: World, capacity: list[int], rows: list[int] | None = None) -> None:
    """Change rows, or rows 0, 1, ..., past the world's oracles, to what they would not allow."""
    rebalance(
        torch.arange(len(capacity)) if rows is None else torch.tensor(rows),
        i32(capacity),
        world.capacity,
        world.states,
        world.free,
        world.num_free,
        impl=world.impl,
    )


def snapshot(world: World) -> list[torch.Tensor]:
    return [t.clone() for t in (*world.states[:3], world.free, world.num_free, world.capacity)]


@pytest.mark.parametrize(
    ("capacity", "free", "got", "message"),
    [
        pytest.param([2, 5], 2, [2, 3], "row 1 got 3 pages, expected 5; 2", id="beyond-the-tables"),
        pytest.param([-1, 3], 2, [2, 3], "row 0 got 2 pages, expected -1; 2", id="negative"),
        pytest.param([4, 4], 2, [4, 3], "row 1 got 3 pages, expected 4; 0", id="one-of-two"),
        pytest.param([4, 4], 1, [2, 3], "row 0 got 2 pages, expected 4; 1", id="not-enough"),
        pytest.param([4, 1], 0, [4, 1], None, id="shrinks-come-first"),
        pytest.param([0, 0], 7, [2, 3], "row 0 got 2 pages, expected 0; 7", id="no-place-for-them"),
    ],
)
def test_a_row_that_cannot_be_served_is_left_alone(
    impl: str, capacity: list[int], free: int, got: list[int], message: str | None
) -> None:
    world = filled_world(impl, [2, 3])
    world.num_free.fill_(free)
    expected = filled_world(impl, [2, 3])
    expected.free, expected.num_free = world.free.clone(), world.num_free.clone()
    change(world, capacity)
    change(expected, got)
    assert world.capacity.tolist() == got
    assert all(map(torch.equal, snapshot(world), snapshot(expected)))
    outcome = (torch.arange(2), i32(capacity), world.capacity, world.num_free)
    if message is None:
        verify_capacity(*outcome)
    else:
        with pytest.raises(KernelError, match=f"new_capacity: {message} pages are free"):
            verify_capacity(*outcome)


def test_the_stack_s_pages_are_given_once_when_a_plan_does_not_fit(impl: str) -> None:
    """Every device page keeps one owner, whatever is asked for."""
    rng = Random(0)
    for _ in range(20):
        world = filled_world(impl, [2, 3])
        change(world, [rng.randint(-1, 5) for _ in range(2)])
        for layer in range(world.layers):
            owned = world.tails[layer].tolist()
            owned += world.free[layer, : world.num_free[layer]].tolist()
            for row in range(2):
                owned += world.states.device_pages[layer, row, : world.capacity[row]].tolist()
            assert sorted(owned) == list(range(world.num_pages))


@pytest.mark.parametrize(
    ("count", "layers", "most"), [(9, 2, 3), (9, 2, 5), (1030, 1, 5)], ids=["fits", "not", "many"]
)
def test_rows_change_at_once_as_one_after_the_other(
    impl: str, count: int, layers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As C++ changes them on a CPU, which takes one row after the other, whatever is asked for."""
    monkeypatch.setattr(op, "REBALANCE_BYTES", 4 * layers * 8 * 5)  # Of four rows.
    rng = Random(count)
    rows = rng.sample(range(count), count)
    before, asked = ([rng.randint(0, n) for _ in rows] for n in (4, most))
    asked[:2] = [-1, 6]
    worlds = [World(count, 5, Random(0), name, layers) for name in (impl, "cpu")]
    for world in worlds:
        world.resize(rows, before)
        world.check()
        world.free, world.num_free = world.free[:, : 3 * count], world.num_free - 2 * count
        change(world, asked, rows)
    assert all(map(torch.equal, *map(snapshot, worlds)))
    assert len(set(worlds[0].capacity.tolist())) > 2


@pytest.mark.parametrize("name", ["reference", "cuda"])
def test_nothing_is_read_back_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have no values: whatever reads one on the host raises."""
    launched = []
    monkeypatch.setitem(IMPLEMENTATIONS, "cuda", lambda op, place: op.function("cuda"))
    monkeypatch.setattr(operation, "call_cuda", lambda op, *args: launched.append(op))
    tables = RowState(*(torch.zeros(2, 3, 4, dtype=torch.int32, device="meta") for _ in range(3)))
    rows = torch.zeros(2, dtype=torch.int64, device="meta")
    capacity, num_free = (torch.zeros(n, dtype=torch.int32, device="meta") for n in (3, 2))
    free = torch.zeros(2, 9, dtype=torch.int32, device="meta")
    changes = rows.int()
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(changes.max())
    rebalance(rows, changes, capacity, tables, free, num_free, impl=name)
    reset_rows(rows, capacity, tables, impl=name)
    assert launched == (["rebalance", "reset_rows"] if name == "cuda" else [])


def test_a_row_that_is_not_there_is_not_emptied(impl: str) -> None:
    """-1 is no name of the last row."""
    world = filled_world(impl, [2, 3])
    before = snapshot(world)
    for row in (-1, 2):
        with pytest.raises((KernelError, IndexError)):
            reset_rows(torch.tensor([row]), world.capacity, world.states, impl=impl)
        assert all(map(torch.equal, snapshot(world), before))
