"""Work that is large enough for several threads gives the bytes that one thread gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hisparse.kernels import (
    DecodeRows,
    RowState,
    diff_tables,
    gather_pages,
    gather_tokens,
    scatter_tokens,
    serial_operators,
)
from hisparse.kernels.operation import ResultMemory
from hisparse.types import PagedKV, Selection

ROWS, WIDTH, SLOTS, PAGES = 8, 1500, 4000, 6000


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def selections(seed: int, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pages = torch.stack([torch.randperm(PAGES, generator=generator) for _ in range(ROWS)])
        yield pages[:, :WIDTH].int() - 1


def trace(seed: int, impl: str, steps: int = 6) -> list[Tensor]:
    """All outputs of some steps, and the tables that they leave behind."""
    capacity = torch.arange(SLOTS - ROWS, SLOTS, dtype=torch.int32)
    order = torch.arange(SLOTS, dtype=torch.int32).repeat(ROWS, 1)
    order[order >= capacity[:, None]] = -1
    state = RowState(torch.full_like(order, -1), order, order.clone())
    table = torch.arange(ROWS * PAGES, dtype=torch.int32).view(ROWS, PAGES)
    counts, tails = torch.full_like(capacity, PAGES), torch.full_like(capacity, ROWS * SLOTS)
    real = torch.tensor([ROWS - 1], dtype=torch.int32)
    step = DecodeRows(torch.arange(ROWS), capacity, real, table, counts, tails, tails)
    outputs: list[Tensor] = []
    for selection in selections(seed, steps):
        lengths = (selection >= 0).int().cumprod(1).sum(1).int()
        lengths[-1] = 0  # Padding.
        outputs += diff_tables(Selection(selection, lengths), step, state, page_size=1, impl=impl)[
            :6
        ]
    return [*outputs, *state[:3]]


def test_tables_of_many_rows() -> None:
    for got, expected in zip(trace(1, "cpu"), trace(1, "reference"), strict=True):
        assert torch.equal(got, expected)


def test_callers_on_several_threads_do_not_meet() -> None:
    expected = [trace(seed, "reference", 3) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        got = [pool.submit(trace, seed, "cpu", 3) for seed in range(3) for _ in range(3)]
    for i, future in enumerate(got):
        for a, b in zip(future.result(), expected[i // 3], strict=True):
            assert torch.equal(a, b)


def test_transfers_of_many_pages_and_tokens() -> None:
    torch.manual_seed(0)
    src = PagedKV(torch.randn(3000, 2, 16, 32), torch.randn(3000, 2, 16, 32))
    dst, expected = (PagedKV(*(torch.zeros(2500, 1, 16, 32) for _ in "kv")) for _ in range(2))
    src_pages = torch.randint(-100, 3000, (4, 600), dtype=torch.int32)
    dst_pages = torch.randperm(2500)[:2400].view(4, 600).int()
    gather_pages(src, src_pages, expected, dst_pages, heads=2, impl="reference")
    for _ in range(100):  # A call that does not wait for all of its threads is seen in a few.
        for pages in dst:
            pages.zero_()
        gather_pages(src, src_pages, dst, dst_pages, heads=2, impl="cpu")
        assert all(map(torch.equal, dst, expected))

    slots = torch.randperm(3000 * 16)[:20_000]
    tokens = gather_tokens(src, slots, impl="cpu")
    assert all(map(torch.equal, tokens, gather_tokens(src, slots, impl="reference")))
    copy = PagedKV(*(torch.zeros_like(x) for x in src))
    scatter_tokens(*tokens, copy, slots, impl="cpu")
    assert all(map(torch.equal, gather_tokens(copy, slots, impl="reference"), tokens))


@pytest.mark.parametrize("same", [False, True])
def test_operators_are_serial_inside_only_and_kernels_keep_their_threads(same: bool) -> None:
    """The second, nested use must not end the first."""
    outer = serial_operators(torch.device("cpu"))
    expected = trace(1, "reference", 2)
    with outer:
        with outer if same else serial_operators(torch.device("cpu")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
        got = trace(1, "cpu", 2)
    assert torch.get_num_threads() == 4
    assert all(map(torch.equal, got, expected))


def test_threads_share_no_memory_of_results() -> None:
    """And within a thread, results that are kept have memory of their own."""
    memory = ResultMemory()
    with memory, ThreadPoolExecutor(1) as pool:
        pool.submit(trace, 1, "cpu", 1).result()
        assert not memory
        got = trace(1, "cpu", 2)
        assert memory
    assert all(map(torch.equal, got, trace(1, "reference", 2)))


def test_operators_are_parallel_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="went wrong"), serial_operators(torch.device("cpu")):
        raise ValueError("went wrong")
    assert torch.get_num_threads() == 4
