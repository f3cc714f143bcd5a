"""``diff_tables``: which device pages a row attends, which it loads, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import DecodeRows, DiffTables, RowState, diff_tables, verify_diff
from hisparse.types import Selection
from tests.kernels.world import i32, indexed, wide_trace

SIZE = 16
TABLE = i32([[page + 100 for page in range(10)]])
NOTHING = [-1] * 4


def example(rows: int = 1) -> RowState:
    """Capacity 4 of 6, order (cold to hot) slots 2:p7, 0:p1, 3:p4, 1:p9."""
    tables = ([1, 9, 7, 4, -1, -1], [2, 0, 3, 1, -1, -1], [10, 11, 12, 13, -1, -1])
    return indexed(*(i32([table] * rows) for table in tables))


def rows_of(count: int, *, real: int | None = None, **changed: Tensor | None) -> DecodeRows:
    """One row a request; all have ten pages and five tokens in tail page 77."""
    rows = DecodeRows(
        rows=torch.arange(count),
        capacity=i32([4] * count),
        num_real_rows=i32([count if real is None else real]),
        host_page_table=TABLE.repeat(count, 1),
        num_pages=i32([10] * count),
        tail_pages=i32([77] * count),
        tail_lens=i32([5] * count),
        counts=torch.tensor([2**40] * 3),
    )
    return rows._replace(**changed)


def run(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    impl: str,
    state: RowState | None = None,
    **options: Any,
) -> tuple[DiffTables, RowState]:
    state = state or example(max(1, len(rows.rows)))
    chosen = None
    if selection is not None and lengths is not None:
        chosen = Selection(selection, lengths)
    found = diff_tables(chosen, rows, state, page_size=SIZE, impl=impl, **options)
    return found, state


def test_the_tail_page_follows_the_selection_and_misses_are_loaded(impl: str) -> None:
    """Hits 4 and 9 lie in slots 3 and 1; page 5 takes slot 2, the coldest."""
    found, state = run(i32([[4, 5, 9, -1]]), i32([3]), rows_of(1), impl)
    assert found.attended.tolist() == [[13, 12, 11, 77, -1]]
    assert found.seq_lens.tolist() == [3 * SIZE + 5]
    assert found.loads.tolist() == [[12, -1, -1, -1]]
    assert found.load_host_pages.tolist() == [[105, -1, -1, -1]]
    assert (found.num_hits.tolist(), found.num_misses.tolist()) == ([2], [1])
    assert state.lru_order.tolist() == [[0, 2, 3, 1, -1, -1]]
    assert state.slot_pages.tolist() == [[1, 9, 5, 4, -1, -1]]


def test_all_pages_are_attended_without_a_selection(impl: str) -> None:
    rows = rows_of(2, num_pages=i32([3, 0]))
    found, _ = run(None, None, rows, impl, width=5)
    assert found.load_host_pages.tolist() == [[100, 102, -1, -1, -1], [-1] * 5]
    assert found.seq_lens.tolist() == [3 * SIZE + 5, 5]
    assert found.attended[:, :4].tolist() == [[12, 10, 13, 77], [77, -1, -1, -1]]


def test_dense_requests_attend_every_page_whatever_is_selected(impl: str) -> None:
    """The second request is dense; its tail page is attended beside any number of pages."""
    dense = torch.tensor([False, True])
    rows = rows_of(2, num_pages=i32([10, 4]), tail_lens=i32([SIZE, 5]), dense=dense)
    selection, lengths = i32([[1, 4], [2, -1]]), i32([2, 1])
    found, _ = run(selection, lengths, rows, impl, width=4, tail_below=2)
    assert found.attended[0].tolist() == [10, 13, 77, -1, -1]
    assert found.seq_lens.tolist() == [2 * SIZE, 4 * SIZE + 5]
    assert found.load_host_pages.tolist() == [NOTHING, [100, 102, 103, -1]]
    assert found.attended[1, 4] == 77


def test_a_full_tail_page_is_left_out_where_a_selection_fills_the_budget(impl: str) -> None:
    """The tail page of the last request is not full."""
    selection, rows = i32([[1, 4, 9], [1, 4, -1], [1, 4, 9]]), rows_of(3)
    rows = rows._replace(tail_lens=i32([SIZE, SIZE, SIZE - 1]))
    found, _ = run(selection, i32([3, 2, 3]), rows, impl, tail_below=3)
    assert found.seq_lens.tolist() == [3 * SIZE, 3 * SIZE, 4 * SIZE - 1]


def test_misses_of_a_row_that_does_not_wait_are_away(impl: str) -> None:
    """They are loaded. Both requests have two misses; the second is dense."""
    dense = torch.tensor([False, True])
    rows = rows_of(2, num_pages=i32([10, 3]), tail_lens=i32([SIZE, 5]), dense=dense)
    selection, lengths = i32([[4, 5, 6, 9]] * 2), i32([4, 4])
    found, state = run(selection, lengths, rows, impl, tail_below=4, waits=False)
    assert found.away is not None
    assert found.away.tolist() == [2, 2]
    assert found.num_misses.tolist() == [2, 2]
    assert found.attended.tolist() == [[13, 11, 77, -1, -1], [10, 77, -1, -1, -1]]
    # The tail page counts by what is selected, not by what is attended on the device.
    assert found.seq_lens.tolist() == [2 * SIZE, SIZE + 5]
    assert found.load_host_pages.tolist() == [[105, 106, -1, -1], [100, 102, -1, -1]]
    assert found.loads.tolist() == [[12, 10, -1, -1], [12, 13, -1, -1]]
    assert state.slot_pages[0].tolist() == [6, 9, 5, 4, -1, -1]
    assert state.lru_order[0].tolist() == [2, 0, 3, 1, -1, -1]
    assert rows.counts is not None
    assert rows.counts.tolist() == [2**40 + 3, 2**40 + 4, 2**40]


def test_nothing_is_away_where_all_rows_wait(impl: str) -> None:
    found, _ = run(i32([[4, 5, 9, -1]]), i32([3]), rows_of(1), impl)
    assert found.away is None


@pytest.mark.parametrize("real", [0, 1])
def test_padding_attends_its_tail_page_and_changes_nothing(impl: str, real: int) -> None:
    """All padded rows name the state row of the first."""
    rows = rows_of(3, real=real, rows=torch.tensor([0, 0, 0]), num_pages=i32([10, 0, 0]))
    found, state = run(i32([[4, 5], [-1, -1], [-1, -1]]), i32([2 * real, 0, 0]), rows, impl)
    assert found.attended[real:].tolist() == [[77, -1, -1]] * (3 - real)
    assert found.seq_lens.tolist() == [2 * SIZE * real + 5, 5, 5]
    assert found.num_hits.tolist() == [real, 0, 0]
    assert rows.counts is not None
    assert rows.counts.tolist() == [2**40 + real, 2**40 + real, 2**40]
    for now, before in zip(state[:3], example(3)[:3], strict=True):
        assert torch.equal(now[real:], before[real:])


@pytest.mark.parametrize("away", [False, True], ids=["", "away"])
@pytest.mark.parametrize(
    ("pages", "length", "wrong"),
    [
        pytest.param([4, 5, 9, -1], 3, False, id="well-formed"),
        pytest.param(NOTHING, 0, False, id="empty"),
        pytest.param([1, 2, 3, 4], 4, False, id="full"),
        pytest.param([4, 5, 4, -1], 3, True, id="twice"),
        pytest.param([5, 5, 9, -1], 3, True, id="a-miss-twice"),
        pytest.param([4, -1, 5, 9], 3, True, id="gap"),
        pytest.param([4, 4, 5, -1], 2, True, id="twice-and-one-more"),
        pytest.param([4, 5, 9, -1], 2, True, id="too-short-a-length"),
        pytest.param([4, 5, -1, -1], 3, True, id="too-long-a-length"),
    ],
)
def test_malformed_selections_are_counted(
    impl: str, pages: list[int], length: int, wrong: bool, away: bool
) -> None:
    """Among good rows, in wide tables too, and not in rows of padding."""
    for width in (4, 300):
        chosen = [[4, 5, -1, -1], pages, [1, 9, 7, -1], pages]
        selection = i32([[*row, *[-1] * (width - 4)] for row in chosen])
        rows = rows_of(4, real=3)
        found, _ = run(selection, i32([2, length, 3, length]), rows, impl, waits=not away)
        assert rows.counts is not None
        moved = [int(x[:3].sum()) for x in (found.num_hits, found.num_misses)]
        assert (rows.counts - 2**40).tolist() == [*moved, wrong]


@pytest.mark.parametrize(
    ("pages", "length"),
    [
        pytest.param([4, -1, 5, 9], 3, id="gap"),
        pytest.param([4, 5, -1, -1], 3, id="too-long-a-length"),
    ],
)
def test_a_row_without_a_page_attends_its_tail_alone(
    impl: str, pages: list[int], length: int
) -> None:
    """Attention reads all entries before the length: a -1 there is memory before the pool."""
    found, _ = run(i32([[4, 9, -1, -1], pages]), i32([2, length]), rows_of(2), impl)
    assert found.attended[0].tolist() == [13, 11, 77, -1, -1]
    if impl == "cpu":
        assert found.seq_lens.tolist() == [2 * SIZE + 5, 3 * SIZE + 5], "attention raises an error"
        return
    assert found.attended[1].tolist() == [77, *NOTHING]
    assert found.seq_lens.tolist() == [2 * SIZE + 5, 5]


REFUSED = [
    pytest.param({}, [1, 2, 3, 5, 6], id="more-pages-than-slots"),
    pytest.param({"num_pages": i32([6])}, [4, 6, -1, -1, -1], id="page-of-another-request"),
    pytest.param({"num_pages": i32([30])}, [4, 20, -1, -1, -1], id="page-beyond-the-table"),
    pytest.param({"capacity": i32([7])}, [4, -1, -1, -1, -1], id="capacity-beyond-the-tables"),
    pytest.param({"rows": torch.tensor([3])}, [4, -1, -1, -1, -1], id="no-such-row"),
]


@pytest.mark.parametrize(("change", "pages"), REFUSED)
def test_a_row_that_cannot_be_served_is_an_error(
    impl: str, change: dict[str, Tensor], pages: list[int]
) -> None:
    """Before anything changes. Where a row is only marked, ``verify_diff`` raises it."""
    state, lengths = example(), i32([sum(page >= 0 for page in pages)])

    def serve() -> None:
        rows = rows_of(1, **change)
        found, _ = run(i32([pages]), lengths, rows, impl, state)
        verify_diff(found.num_misses, Selection(i32([pages]), lengths), rows)

    with pytest.raises((KernelError, IndexError, RuntimeError)):
        serve()
    assert all(map(torch.equal, state[:3], example()[:3]))


@pytest.mark.parametrize(
    ("change", "pages", "message"),
    [
        (
            {},
            [1, 2, 3, 5, 6, 6, -1],
            "got 5 pages in state row 0, .* its capacity, 4",
        ),
        ({"num_pages": i32([6])}, [4, 6, -1], "got page 6 in row 0, expected -1 to 5"),
        ({"capacity": i32([7])}, [4], "capacity: got 7 in row 0, expected 0 to 6"),
        ({"capacity": i32([5])}, [4], "got slot -1 in state row 0, entry 4, expected 0 to 5"),
        ({"rows": torch.tensor([3])}, [4], "rows: got 3 in row 0, expected 0 to 0"),
    ],
)
def test_the_error_says_what_was_given(
    change: dict[str, Tensor], pages: list[int], message: str
) -> None:
    lengths = i32([sum(page >= 0 for page in pages)])
    with pytest.raises(KernelError, match=message):
        run(i32([pages]), lengths, rows_of(1, **change), "cpu", waits=False)


@pytest.mark.parametrize(("change", "pages"), REFUSED)
def test_a_gpu_marks_it_counts_it_and_attends_the_tail_page(
    unverified: str, change: dict[str, Tensor], pages: list[int]
) -> None:
    rows = rows_of(1, **change)
    found, state = run(i32([pages]), i32([sum(p >= 0 for p in pages)]), rows, unverified)
    assert found.attended.tolist() == [[77] + [-1] * 5]
    assert (found.seq_lens.tolist(), found.num_misses.tolist()) == ([5], [-1])
    assert found.loads.tolist() == found.load_host_pages.tolist() == [[-1] * 5]
    assert all(map(torch.equal, state[:3], example()[:3]))
    assert rows.counts is not None
    assert (rows.counts - 2**40).tolist() == [0, 0, 1]


def test_a_slot_beyond_the_capacity_gets_nothing(unverified: str) -> None:
    """A damaged order: no device page belongs to the slot, so bytes would go to any page."""
    rows, state = rows_of(1), example()
    state.lru_order[0, 0] = 5
    found, _ = run(i32([[4, 5, 9, -1]]), i32([3]), rows, unverified, state)
    assert found.attended.tolist() == [[77, *NOTHING]]
    assert found.loads.tolist() == [NOTHING]
    assert rows.counts is not None
    assert (rows.counts - 2**40).tolist() == [0, 0, 1]


def strided(tensor: Tensor) -> Tensor:
    """The same values with other elements in between, in every dimension."""
    apart = torch.full([2 * n for n in tensor.shape], 3).to(tensor.dtype)
    view = apart[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def test_inputs_may_be_strided(impl: str) -> None:
    results = []
    for change in (torch.clone, strided):
        fields = rows_of(2, counts=None)._asdict().items()
        given = {name: change(x) for name, x in fields if x is not None}
        selection, lengths = change(i32([[4, 5], [9, 1]])), change(i32([2, 1]))
        found, state = run(selection, lengths, DecodeRows(**given), impl)
        results.append([t.tolist() for t in (*found[:6], *state[:3])])
    assert results[0] == results[1]


@pytest.mark.parametrize("width", [0, 3], ids=["nothing-selected", "no-rows"])
def test_empty_input_gives_empty_tables(impl: str, width: int) -> None:
    count = 0 if width else 2
    selection = torch.zeros(count, width, dtype=torch.int32)
    found, state = run(selection, i32([0] * count), rows_of(count), impl)
    assert found.attended.tolist() == [[77]] * count
    assert found.loads.shape == (count, width)
    assert found.num_misses.tolist() == [0] * count
    assert all(map(torch.equal, state[:3], example(max(1, count))[:3]))


@pytest.mark.parametrize(
    "sizes", [(2, 2048, 4096, 5000), (2, 40, 4200, 4300)], ids=["the-goal", "tables-in-place"]
)
def test_large_rows_agree_with_the_reference(impl: str, sizes: tuple[int, ...]) -> None:
    """The goal has blocks of 1,024 threads, and 107 KB of lists and tables in shared memory."""
    assert all(map(torch.equal, wide_trace(impl, *sizes), wide_trace("reference", *sizes)))
