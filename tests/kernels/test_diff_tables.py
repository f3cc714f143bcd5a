"""``diff_tables``: which device pages a row attends, which it loads, and what it refuses."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import (
    DecodeRows,
    DiffTables,
    RowState,
    diff_tables,
    lru_diff,
    verify_diff,
)
from tests.kernels.world import World, i32, indexed
from tests.sizes import sized

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
        malformed=torch.tensor([2**40]),
    )
    return rows._replace(**changed)


def run(
    selection: Tensor | None, lengths: Tensor | None, rows: DecodeRows, impl: str, **options: int
) -> tuple[DiffTables, RowState]:
    state = example(max(1, len(rows.rows)))
    found = diff_tables(selection, lengths, rows, state, page_size=SIZE, impl=impl, **options)
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
    rows = rows_of(2, num_pages=i32([10, 4]), dense=torch.tensor([False, True]))
    selection, lengths = i32([[1, 4], [2, -1]]), i32([2, 1])
    found, _ = run(selection, lengths, rows, impl, width=4, tail_below=2)
    assert found.attended[0].tolist() == [10, 13, 77, -1, -1]
    assert found.seq_lens.tolist() == [2 * SIZE, 4 * SIZE + 5]
    assert found.load_host_pages.tolist() == [NOTHING, [100, 102, 103, -1]]
    assert found.attended[1, 4] == 77


def test_the_tail_page_is_left_out_where_a_selection_fills_the_budget(impl: str) -> None:
    selection = i32([[1, 4, 9], [1, 4, -1]])
    found, _ = run(selection, i32([3, 2]), rows_of(2), impl, tail_below=3)
    assert found.seq_lens.tolist() == [3 * SIZE, 2 * SIZE + 5]


def test_padding_attends_its_tail_page_and_changes_nothing(impl: str) -> None:
    """Both padded rows name the state row of the real one."""
    rows = rows_of(3, real=1, rows=torch.tensor([0, 0, 0]), num_pages=i32([10, 0, 0]))
    found, state = run(i32([[4, 5], [-1, -1], [-1, -1]]), i32([2, 0, 0]), rows, impl)
    assert found.attended[1:].tolist() == [[77, -1, -1]] * 2
    assert found.seq_lens.tolist() == [2 * SIZE + 5, 5, 5]
    assert found.num_hits.tolist() == [1, 0, 0]
    assert state.slot_pages[1].tolist() == example().slot_pages[0].tolist()
    assert rows.malformed is not None
    assert rows.malformed.tolist() == [2**40]


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
    impl: str, pages: list[int], length: int, wrong: bool
) -> None:
    """Among good rows, in wide tables too, and not in rows of padding."""
    for width in (4, 300):
        chosen = [[4, 5, -1, -1], pages, [1, 9, 7, -1], pages]
        selection = i32([[*row, *[-1] * (width - 4)] for row in chosen])
        rows = rows_of(4, real=3)
        run(selection, i32([2, length, 3, length]), rows, impl)
        assert rows.malformed is not None
        assert rows.malformed.tolist() == [2**40 + wrong]


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
    pytest.param({"capacity": i32([7])}, [4, -1, -1, -1, -1], id="capacity-beyond-the-tables"),
    pytest.param({"rows": torch.tensor([3])}, [4, -1, -1, -1, -1], id="no-such-row"),
]


def serve(impl: str, change: dict[str, Tensor], pages: list[int]) -> None:
    """Raise an error for a refused row, also where it is only marked."""
    selection, lengths = i32([pages]), i32([sum(page >= 0 for page in pages)])
    found, _ = run(selection, lengths, rows_of(1, **change), impl)
    verify_diff(found.num_misses, i32([4]))


@pytest.mark.parametrize(("change", "pages"), REFUSED)
def test_a_row_that_cannot_be_served_is_an_error(
    impl: str, change: dict[str, Tensor], pages: list[int]
) -> None:
    with pytest.raises((KernelError, IndexError, RuntimeError)):
        serve(impl, change, pages)


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
    assert rows.malformed is not None
    assert rows.malformed.tolist() == [2**40 + 1]


def pages_of(device_pages: Tensor, slots: Tensor) -> Tensor:
    """``[R, K]``, device pages of the slots of each row, -1 for none."""
    return device_pages.gather(1, slots.clamp(min=0).long()).where(slots >= 0, -1)


@settings(max_examples=sized(20, 200), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_tables_are_the_pages_of_what_lru_diff_finds(impl: str, seed: int) -> None:
    """Any selections over some steps: the same rows by ``lru_diff`` and look-ups of its slots."""
    rng = Random(seed)
    width, slots, count, heads = rng.randint(1, 6), rng.randint(6, 40), rng.randint(1, 3), 2
    worlds = [World(count * heads, slots, Random(1), impl) for _ in range(2)]
    for world in worlds:
        world.resize(list(range(count * heads)), [slots] * (count * heads))
    for _ in range(3):
        num_pages = [rng.randint(width, 60) for _ in range(count)]
        lengths = [rng.randint(0, width) for _ in range(count * heads)]
        chosen = [
            sorted(rng.sample(range(num_pages[r // heads]), n)) + [-1] * (width - n)
            for r, n in enumerate(lengths)
        ]
        selection, table = i32(chosen), i32([rng.sample(range(999), 60) for _ in range(count)])
        fused, apart = (world.layer(0) for world in worlds)
        index, real = torch.arange(count * heads), i32([count * heads])
        tails = i32([1000 + r for r in index])
        own = DecodeRows(index, worlds[0].capacity, real, table, i32(num_pages), tails, tails)
        found = diff_tables(selection, i32(lengths), own, fused, page_size=SIZE, impl=impl)
        inputs = (selection, table, worlds[1].capacity, real, apart)
        diff = lru_diff(*inputs, rows=index, num_pages=i32(num_pages), impl=impl)
        attended = pages_of(apart.device_pages, diff.curr_device_slots)
        attended = torch.nn.functional.pad(attended, (0, 1), value=-1)
        attended.scatter_(1, i32(lengths)[:, None].long(), tails[:, None])
        loads = pages_of(apart.device_pages, diff.load_device_slots)
        assert torch.equal(found.attended, attended)
        assert torch.equal(found.loads, loads)
        assert torch.equal(found.load_host_pages, diff.load_host_pages)
        assert torch.equal(found.num_misses, diff.num_misses)
        assert all(map(torch.equal, fused[:3], apart[:3]))


def test_inputs_may_be_strided(impl: str) -> None:
    plain, _ = run(i32([[4, 5], [9, 1]]), i32([2, 1]), rows_of(2), impl)
    selection, lengths = i32([[4, 9], [5, 1]]).t(), i32([2, 9, 1])[::2]
    changed, _ = run(selection, lengths, rows_of(2, tail_lens=i32([5, 0, 5])[::2]), impl)
    assert [t.tolist() for t in plain] == [t.tolist() for t in changed]


@pytest.mark.parametrize("width", [0, 3], ids=["nothing-selected", "no-rows"])
def test_empty_input_gives_empty_tables(impl: str, width: int) -> None:
    count = 0 if width else 2
    selection = torch.zeros(count, width, dtype=torch.int32)
    found, _ = run(selection, i32([0] * count), rows_of(count), impl)
    assert found.attended.tolist() == [[77]] * count
    assert found.loads.shape == (count, width)
