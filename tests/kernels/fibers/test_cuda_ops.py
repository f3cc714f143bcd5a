"""What the CUDA operations promise beyond the contract suite, on fibers."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from hisparse.errors import KernelError
from hisparse.kernels import RowState, gather_pages, gather_tokens, promote_tail, scatter_tokens
from hisparse.kernels.build import cuda as _build_cuda
from hisparse.kernels.transfer import op as transfer
from hisparse.kernels.transfer.op import copy_pages
from hisparse.types import PagedKV
from tests.kernels.test_transfer import LAYOUTS, assert_same_bytes, pages
from tests.kernels.world import World, diff_slots, full_state, i32, indexed, wide_trace


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine takes pages however few follow each other."""
    monkeypatch.setattr(transfer, "MIN_COPY_BYTES", 0)


@pytest.fixture
def small_shared_memory(fibers: str) -> Iterator[str]:
    """A device on which no selection fits into shared memory."""
    _build_cuda.call_cuda("set_shared_limit", 1024)
    yield fibers
    _build_cuda.call_cuda("set_shared_limit", -1)


def test_a_selection_too_wide_for_shared_memory_uses_scratch(small_shared_memory: str) -> None:
    state = full_state(1, 400, 400)
    assert _build_cuda.call_cuda("diff_tables_scratch_bytes", state.slot_pages, 300) > 1024
    sizes = (4, 300, 400, 700)
    got = wide_trace(small_shared_memory, *sizes)
    assert all(map(torch.equal, got, wide_trace("reference", *sizes)))


def test_a_row_whose_order_names_no_slot_is_marked_and_unchanged(unverified: str) -> None:
    state = full_state(3, 6, 4)
    state.slot_pages[0, :4] = i32([7, 1, 8, 9])
    state = indexed(*state[:3])
    state.lru_order[0, 2] = 9
    before = [t.clone() for t in state[:3]]
    selection, table = i32([[1, 2, 3, -1, -1]]), i32([list(range(20))])
    diff = diff_slots(selection, table, i32([4]), i32([1]), state, impl=unverified)
    assert [t.tolist() for t in diff[:5]] == [[[-1] * 5]] * 3 + [[0], [-1]]
    assert all(map(torch.equal, state[:3], before))


def test_indices_out_of_range_touch_nothing(unverified: str) -> None:
    pool, pair = pages("page_head", 4, 2, 4, (8, 8)), i32([[0, 1]])
    before = PagedKV(pool.k.clone(), pool.v.clone())
    gather_pages(pool, i32([[4, 2**31 - 1]]), pool, pair, impl=unverified)
    gather_pages(pool, pair, pool, i32([[4, 2**31 - 1]]), impl=unverified)
    token = torch.ones(2, 2, 8)
    scatter_tokens(token, token, pool, torch.tensor([16, -1]), impl=unverified)
    assert_same_bytes(pool, before)


def test_verification_names_what_is_out_of_range(fibers: str) -> None:
    pool, pair = pages("page_head", 4, 2, 4, (8, 8)), i32([[0, 1]])
    with pytest.raises(KernelError, match="src_pages: got 4, expected -1 to 3"):
        gather_pages(pool, i32([[0, 4]]), pool, pair, impl=fibers)
    with pytest.raises(KernelError, match="slots: got -1, expected 0 to 15"):
        gather_tokens(pool, torch.tensor([-1]), impl=fibers)
    with pytest.raises(KernelError, match="got in row 0 2 pages, expected at most its capacity, 1"):
        diff_slots(
            i32([[1, 2]]), i32([[0] * 3]), i32([1]), i32([1]), full_state(1, 1, 1), impl=fibers
        )
    world = World(1, 4, Random(0), fibers)
    full = torch.tensor([True])
    args = (torch.tensor([5]), i32([0]), full, i32([4]), world.layer(0), world.tails[0])
    with pytest.raises(KernelError, match="rows: got 5, expected 0 to 0"):
        promote_tail(*args, impl=fibers)


def test_rows_that_are_not_contiguous_or_odd_are_refused(fibers: str) -> None:
    good, pair = pages("page_head", 4, 2, 4, (8, 8)), i32([[0, 1]])
    strided = PagedKV(torch.zeros(4, 2, 4, 16)[..., ::2], good.v)
    with pytest.raises(KernelError, match="src.k: got stride 2 in its last dimension, expected 1"):
        gather_pages(strided, pair, good, pair, impl=fibers)
    with pytest.raises(KernelError, match="dst.k: got stride 2 in its last dimension"):
        scatter_tokens(
            torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), strided, pair[0, :1].long(), impl=fibers
        )
    odd = PagedKV(*(torch.zeros(4, 2, 4, 5, dtype=torch.uint8) for _ in "kv"))
    with pytest.raises(KernelError, match="src.k or dst.k: got rows of 5 bytes .* expected multip"):
        gather_pages(odd, pair, odd, pair, impl=fibers)
    memory = torch.zeros(4 * 2 * 4 * 8 + 1, dtype=torch.uint8)[1:].view(4, 2, 4, 8)
    even = torch.zeros(4, 2, 4, 8, dtype=torch.uint8)
    shifted, plain = PagedKV(even, memory), PagedKV(even, even.clone())
    with pytest.raises(KernelError, match="src.v or dst.v: got rows of 8 bytes"):
        gather_pages(shifted, pair, plain, pair, impl=fibers)
    state = RowState(*(torch.zeros(1, 8, dtype=torch.int32)[:, ::2] for _ in range(4)))
    with pytest.raises(KernelError, match="slot_pages: got stride 2 in its last dimension"):
        diff_slots(i32([[0]]), i32([[0]]), i32([4]), i32([1]), state, impl=fibers)


def test_a_dimension_of_size_one_may_have_any_stride(fibers: str) -> None:
    """Nothing steps along it: an odd stride there neither slows a copy nor refuses it."""
    memory = torch.arange(4 * 8, dtype=torch.uint8)
    src, dst = (
        x.as_strided((4, 1, 1, 8), (8, 3, 5, 1)) for x in (memory, torch.zeros_like(memory))
    )
    gather_pages(PagedKV(src, src), i32([[1, 2]]), PagedKV(dst, dst), i32([[3, 0]]), impl=fibers)
    assert torch.equal(dst[[3, 0]], src[[1, 2]])


def test_unpinned_host_memory_is_refused(fibers: str) -> None:
    pool, pair = pages("page_head", 4, 2, 4, (8, 8)), i32([[0, 1]])
    for name, tensor in (("src.k", pool.k), ("src.v", pool.v)):
        _build_cuda.call_cuda("set_pinned", tensor, False)
        with pytest.raises(KernelError, match=f"{name}: got unpinned host memory, expected device"):
            gather_pages(pool, pair, PagedKV(pool.k.clone(), pool.v.clone()), pair, impl=fibers)
        _build_cuda.call_cuda("set_pinned", tensor, True)


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 3], ids=["whole", "per-head"])
@pytest.mark.usefixtures("every")
def test_the_copy_engine_gives_the_kernel_s_bytes(
    fibers: str, layout: str, to: str, heads: int
) -> None:
    torch.manual_seed(0)
    src = pages(layout, 20, 3, 4, (8, 16))
    dst, expected = (pages(to, 30, 3 if heads == 1 else 1, 4, (8, 16), fill=5.0) for _ in "ab")
    src_pages = i32([[3, 4, 5, -1, 6, 9], [10, 11, 12, 0, 1, 2], [7, 7, 8, 8, -1, 19]])
    dst_pages = i32([[0, 1, 2, 29, 3, 4], [5, 6, 7, 10, 11, 12], [20, 21, -1, 22, 23, 24]])
    assert copy_pages(src, src_pages, dst, dst_pages, heads)
    gather_pages(src, src_pages, expected, dst_pages, heads=heads, impl=fibers)
    assert_same_bytes(dst, expected)


@pytest.fixture
def small_pieces(fibers: str) -> Iterator[int]:
    """CUDA refuses a copy that spans a multiple of so many bytes, which lies within some rows."""
    _build_cuda.call_cuda("set_piece_bytes", 128)
    yield 128
    _build_cuda.call_cuda("set_piece_bytes", 0)


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 3], ids=["whole", "per-head"])
@pytest.mark.usefixtures("every")
def test_a_copy_never_spans_two_pieces_of_page_locked_memory(
    fibers: str,
    small_pieces: int,
    layout: str,
    to: str,
    heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA may refuse one that does: rows that lie in two pieces are split, others go together."""
    src = pages(layout, 20, 3, 4, (20, 36))
    dst, expected = (pages(to, 30, 3 if heads == 1 else 1, 4, (20, 36), fill=5.0) for _ in "ab")
    ids = i32([[3, 4, 5, -1, 6, 9], [10, 11, 12, 0, 1, 2], [7, 8, 13, 14, -1, 19]])
    with pytest.raises(RuntimeError, match="cudaMemcpy(2D)?Async"):
        copy_pages(src, ids, dst, ids, heads)
    monkeypatch.setattr(transfer, "PIECE_BYTES", small_pieces)
    assert copy_pages(src, ids, dst, ids, heads)
    gather_pages(src, ids, expected, ids, heads=heads, impl=fibers)
    assert_same_bytes(dst, expected)


def test_the_copy_engine_is_left_alone_where_calls_are_small(
    fibers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = (pages("page_head", 9, 1, 4, (8, 8), fill=x) for x in (1.0, 2.0))
    ids, apart = i32([[0, 1, 2, 3]]), i32([[0, 2, 4, 6]])
    whole = 4 * 4 * 8 * 4  # bytes of the four pages, which one call moves
    monkeypatch.setattr(transfer, "MIN_COPY_BYTES", whole + 1)
    assert not copy_pages(src, ids, dst, ids, 1)
    monkeypatch.setattr(transfer, "MIN_COPY_BYTES", whole)
    assert not copy_pages(src, apart, dst, ids, 1)
    assert (dst.k == 2).all()
    assert copy_pages(src, ids, dst, ids, 1)
    assert (dst.k[:4] == 1).all()
    with pytest.raises(KernelError, match="dst_pages: got 9, expected at most 8"):
        copy_pages(src, ids, dst, ids + 6, 1)
