"""``page_table`` and ``page_tables``: device pages in the order of the slots."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import LruDiff, PageTables, SelectionGuard, page_table, page_tables
from tests.kernels.world import i32

PAGES = i32([[10, 11, 12, -1], [20, 21, 22, 23], [30, 31, -1, -1]])


def diff_of(slots: Tensor, load_slots: Tensor) -> LruDiff:
    """``page_tables`` reads nothing else of a difference."""
    unread, counts = torch.full_like(slots, 99), i32([99] * len(slots))
    return LruDiff(slots, unread, load_slots, counts, counts)


def test_slots_become_pages(impl: str) -> None:
    table = page_table(PAGES, torch.tensor([2, 0]), i32([[1, 0, -1], [2, -1, 0]]), impl=impl)
    assert table.tolist() == [[31, 30, -1], [12, -1, 10]]


def test_both_tables_of_a_step_come_from_one_call(impl: str) -> None:
    """The tail page follows the last selected page; loads keep their own order."""
    diff = diff_of(
        i32([[1, 0, 2], [0, -1, -1], [-1, -1, -1]]), i32([[2, 1, -1], [-1, -1, -1], [-1, -1, -1]])
    )
    rows, lengths = torch.tensor([1, 0, 2]), i32([3, 1, 0])
    tables = page_tables(PAGES, rows, diff, lengths, i32([7, 8, 9]), impl=impl)
    assert tables.attended.tolist() == [[21, 20, 22, 7], [10, 8, -1, -1], [9, -1, -1, -1]]
    assert tables.loads.tolist() == [[22, 21, -1], [-1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("width", [0, 1, 63, 500], ids=lambda k: f"{k}-entries")
def test_tables_equal_entry_by_entry_lookups(impl: str, width: int) -> None:
    rng, num_states, slots = Random(width), 9, 70
    pages = torch.randperm(num_states * slots).int().view(num_states, slots)
    rows = torch.tensor([rng.randrange(num_states) for _ in range(5)])
    chosen, loaded = (
        i32([[rng.randrange(-1, slots) for _ in range(width)] for _ in rows]).view(5, width)
        for _ in range(2)
    )
    lengths, tails = i32([rng.randint(0, width) for _ in rows]), i32([1000 + r for r in range(5)])
    tables = page_tables(pages, rows, diff_of(chosen, loaded), lengths, tails, impl=impl)
    for r, row in enumerate(rows.tolist()):
        own = [*pages[row].tolist(), -1]
        attended = [*(own[slot] for slot in chosen[r].tolist()), -1]
        attended[int(lengths[r])] = 1000 + r
        assert tables.attended[r].tolist() == attended
        assert tables.loads[r].tolist() == [own[slot] for slot in loaded[r].tolist()]
    assert torch.equal(page_table(pages, rows, loaded, impl=impl), tables.loads)


@pytest.mark.parametrize(
    ("slots", "length", "hits", "misses", "wrong"),
    [
        pytest.param([2, 0, 1, -1], 3, 2, 1, False, id="well-formed"),
        pytest.param([-1, -1, -1, -1], 0, 0, 0, False, id="empty"),
        pytest.param([2, 0, 1, 3], 4, 0, 4, False, id="full"),
        pytest.param([2, 0, 2, -1], 3, 1, 1, True, id="twice"),
        pytest.param([2, -1, 1, 3], 3, 3, 0, True, id="gap"),
        pytest.param([2, 2, 1, -1], 2, 2, 0, True, id="twice-and-one-more"),
        pytest.param([2, 0, 1, -1], 2, 3, 0, True, id="too-short-a-length"),
        pytest.param([2, 0, -1, -1], 3, 2, 0, True, id="too-long-a-length"),
        pytest.param([-1, -1, -1, -1], 3, 0, -1, True, id="refused"),
    ],
)
def test_malformed_selections_are_counted(
    impl: str, slots: list[int], length: int, hits: int, misses: int, wrong: bool
) -> None:
    """Among good rows, in wide tables too, and not in rows of padding."""
    for width in (4, 300):
        good = [0, 1, 2] + [-1] * (width - 3)
        rows = [good, [*slots, *[-1] * (width - 4)], good]
        table = i32([rows[r] for r in (0, 1, 2, 1)])
        counts = [i32([2, hits, 1, hits]), i32([1, misses, 2, misses])]
        diff = LruDiff(table, table, torch.full_like(table, -1), *counts)
        guard = SelectionGuard(i32([3]), torch.tensor([2**40]))
        lengths, states = i32([3, length, 3, length]), torch.tensor([1, 1, 1, 1])
        page_tables(PAGES, states, diff, lengths, i32([7] * 4), guard=guard, impl=impl)
        assert guard.malformed.tolist() == [2**40 + wrong]


@pytest.mark.parametrize(
    ("slots", "length"),
    [
        pytest.param([-1, -1, -1, -1], 3, id="refused"),
        pytest.param([2, -1, 1, 3], 3, id="gap"),
        pytest.param([2, 0, -1, -1], 3, id="too-long-a-length"),
    ],
)
def test_a_row_without_a_page_attends_its_tail_alone(
    impl: str, slots: list[int], length: int
) -> None:
    """Attention reads all entries before the length: a -1 there is memory before the pool."""
    good = [0, 1, 2, -1]
    table = i32([good, slots, good])
    guard = SelectionGuard(i32([3]), torch.tensor([0]))
    lengths, states, tails = i32([3, length, 2]), torch.tensor([1, 1, 1]), i32([7, 8, 9])
    tables = page_tables(
        PAGES, states, diff_of(table, table), lengths, tails, guard=guard, impl=impl
    )
    assert tables.attended[[0, 2]].tolist() == [[20, 21, 22, 7, -1], [20, 21, 9, -1, -1]]
    if impl == "cpu":
        assert tables.lengths.tolist() == [3, length, 2], "attention raises an error"
        return
    assert tables.attended[1].tolist() == [8, -1, -1, -1, -1]
    assert tables.lengths.tolist() == [3, 0, 2]


def test_inputs_may_be_strided(impl: str) -> None:
    slots = i32([[1, 0], [0, 1]]).t()
    rows = torch.tensor([1, 9, 0])[::2]
    expected = [[21, 20], [10, 11]]
    assert page_table(PAGES, rows, slots, impl=impl).tolist() == expected
    pages, lengths, tails = PAGES.t().contiguous().t(), i32([1, 0, 0])[::2], i32([5, 0, 6])[::2]
    tables = page_tables(pages, rows, diff_of(slots, slots), lengths, tails, impl=impl)
    assert tables.loads.tolist() == expected
    assert tables.attended.tolist() == [[21, 5, -1], [6, 11, -1]]


def test_no_rows_give_empty_tables(impl: str) -> None:
    none = i32([[]]).view(0, 3)
    rows, empty = torch.zeros(0, dtype=torch.int64), i32([])
    tables = page_tables(PAGES, rows, diff_of(none, none), empty, empty, impl=impl)
    assert [tuple(t.shape) for t in tables] == [(0, 4), (0, 3), (0,)]


@pytest.mark.parametrize(("rows", "slot"), [(3, 0), (0, 4)], ids=["row", "slot"])
def test_what_is_in_no_table_is_refused(impl: str, rows: int, slot: int) -> None:
    with pytest.raises((KernelError, IndexError)):
        page_table(PAGES, torch.tensor([rows]), i32([[slot]]), impl=impl)


@pytest.mark.parametrize(
    ("row", "slot", "load", "length"),
    [
        pytest.param(3, 0, 0, 0, id="row"),
        pytest.param(0, 4, 0, 0, id="slot"),
        pytest.param(0, 0, 4, 0, id="load-slot"),
        pytest.param(0, 0, 0, 2, id="length"),
    ],
)
def test_tables_of_what_is_in_no_table_are_refused(
    impl: str, row: int, slot: int, load: int, length: int
) -> None:
    diff = diff_of(i32([[slot]]), i32([[load]]))
    with pytest.raises((KernelError, IndexError, RuntimeError)):
        page_tables(PAGES, torch.tensor([row]), diff, i32([length]), i32([0]), impl=impl)


def call(**changed: Tensor) -> PageTables:
    slots = {"slots": i32([[0]]), "load_slots": i32([[0]])}
    tensors = {"rows": torch.tensor([0]), "lengths": i32([0]), "tail_pages": i32([0])}
    tensors |= slots | changed
    diff = diff_of(tensors["slots"], tensors["load_slots"])
    return page_tables(PAGES, tensors["rows"], diff, tensors["lengths"], tensors["tail_pages"])


def test_bad_tensors_are_named() -> None:
    with pytest.raises(KernelError, match=r"slots: got shape \[2, 1\], expected \[1, any\]"):
        page_table(PAGES, torch.tensor([0]), i32([[0], [0]]))
    with pytest.raises(KernelError, match="rows: got dtype torch.int32, expected torch.int64"):
        page_table(PAGES, i32([0]), i32([[0]]))
    with pytest.raises(KernelError, match=r"load_device_slots: got shape \[1, 2\], expected \[1"):
        call(load_slots=i32([[0, 0]]))
    with pytest.raises(KernelError, match=r"lengths: got shape \[2\], expected \[1\]"):
        call(lengths=i32([0, 0]))
    with pytest.raises(KernelError, match="tail_pages: got device meta, expected cpu"):
        call(tail_pages=i32([0]).to("meta"))
