"""Which pages may be shared: those that only dense attention has led to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse.cache.shareable_pages import ShareablePages
from hisparse.testing import Simulator

SIZE = 8
#: Tokens up to which a step is dense, in the simulator too: three pages and a tail.
DENSE = 32


def exact_pages(num_pages: int = 40) -> ShareablePages:
    return ShareablePages(num_pages, SIZE, 4, lambda lens: lens <= DENSE, torch.device("cpu"))


def table(*pages: int) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32)


def read(flags: ShareablePages, *pages: int) -> list[bool]:
    found: list[bool] = flags.read(torch.tensor(pages)).tolist()
    return found


def decode(flags: ShareablePages, slot: int, seq_len: int, pages: torch.Tensor) -> None:
    flags.decode(np.array([slot]), np.array([seq_len]), pages[None])


def test_nothing_is_exact_at_first() -> None:
    assert not exact_pages().read(torch.arange(40)).any()


def test_prefill_is_as_exact_as_what_comes_before_it() -> None:
    flags = exact_pages()
    flags.prefill(0, table(5, 6, 7))
    assert read(flags, 5, 6, 7, 8) == [True, True, True, False]
    flags.prefill(24, table(5, 6, 7, 8))
    assert read(flags, 8) == [True]
    # Page 9 was never written: a chunk after it is not exact, nor is the page that it begins in.
    flags.prefill(12, table(9, 10, 11))
    assert read(flags, 9, 10, 11) == [False, False, False]


def test_a_chunk_that_begins_in_an_exact_page_keeps_it_exact() -> None:
    flags = exact_pages()
    flags.prefill(0, table(5, 6))
    flags.prefill(12, table(5, 6, 7))
    assert read(flags, 5, 6, 7) == [True, True, True]


def test_dense_steps_stay_exact_and_the_first_sparse_one_ends_it() -> None:
    flags, pages = exact_pages(), table(1, 2, 3, 4, 5, 6)
    flags.begin(2)
    flags.prefill(0, pages[:3])
    for seq_len in range(21, DENSE + 1):
        decode(flags, 2, seq_len, pages)
    assert read(flags, 1, 2, 3, 4) == [True] * 4
    for seq_len in range(DENSE + 1, 48):
        decode(flags, 2, seq_len, pages)
    assert read(flags, 1, 2, 3, 4, 5, 6) == [True] * 4 + [False] * 2
    flags.prefill(47, table(1, 2, 3, 4, 5, 6, 7))
    assert read(flags, 6, 7) == [False, False]


def test_a_sparse_step_spoils_the_page_that_a_prompt_has_begun() -> None:
    flags = exact_pages()
    flags.prefill(0, table(1, 2, 3, 4, 5, 6))
    decode(flags, 1, 45, table(1, 2, 3, 4, 5, 6))
    assert read(flags, 5, 6) == [True, False]


def test_a_slot_that_changes_hands_is_marked_again() -> None:
    flags = exact_pages()
    for first in (1, 11):
        flags.begin(3)
        pages = torch.arange(first, first + 6, dtype=torch.int32)
        flags.prefill(0, pages)
        decode(flags, 3, 45, pages)
        assert read(flags, first + 5) == [False]


def test_a_dense_step_after_inexact_pages_is_not_exact() -> None:
    """A prefix may hold pages that another request's sparse steps have left in the cache."""
    flags = exact_pages()
    flags.prefill(0, table(1, 2, 3))
    decode(flags, 0, 17, table(1, 9, 3))
    assert read(flags, 3) == [False]


def test_loaded_pages_are_exact() -> None:
    flags = exact_pages()
    flags.set_exact(torch.tensor([3, 4]))
    flags.prefill(16, table(3, 4, 5))
    assert read(flags, 3, 4, 5) == [True] * 3


def test_the_engine_flags_pages_of_prefill_and_of_decode_steps() -> None:
    sim = Simulator(budget=DENSE)
    flags, _ = sim.coordinator.share_pages()
    request = sim.request(1, 100, seed=0)
    sim.prefill((request, 20))
    while request.done < 60:
        sim.decode(request)
    sim.prefill((request, 20))
    exact = read(flags, *request.host_pages)
    # 32 tokens are within the budget: three full pages, and the page that the last step fills.
    assert exact == [True] * 4 + [False] * 6


def test_steps_of_several_requests_flag_each_its_own() -> None:
    sim = Simulator(budget=DENSE)
    flags, _ = sim.coordinator.share_pages()
    short, long = sim.request(1, 40, seed=0), sim.request(2, 80, seed=1)
    sim.prefill((short, 15), (long, 64))
    for _ in range(9):
        sim.decode(short, long)
    assert read(flags, *short.host_pages) == [True] * 3
    assert read(flags, *long.host_pages) == [True] * 8 + [False] * 2


class CountCalls(TorchDispatchMode):
    """Counts calls of PyTorch."""

    calls: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **kwargs or {})


def count_calls(rows: int, seq_len: int) -> int:
    flags, pages = exact_pages(rows * 8), torch.arange(rows * 8, dtype=torch.int32).view(rows, 8)
    flags._marked = np.full(rows, -1)
    with CountCalls() as counter:
        flags.decode(np.arange(rows), np.full(rows, seq_len), pages)
    return counter.calls


@pytest.mark.parametrize("seq_len", [25, 57], ids=["dense", "sparse"])
def test_a_step_takes_as_many_calls_for_many_requests_as_for_two(seq_len: int) -> None:
    """With pages of one token each row begins a page at each step."""
    assert count_calls(64, seq_len) == count_calls(2, seq_len) > 0


def test_a_step_of_many_requests_flags_what_steps_of_each_one_flag() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        together, alone = exact_pages(4 * 8), exact_pages(4 * 8)
        pages = torch.from_numpy(rng.permutation(32).astype(np.int32)).view(4, 8)
        shown = torch.from_numpy(rng.choice(32, 14, replace=False))
        lens = rng.choice([1, 8, 9, 17, 24, 25, 32, 33, 41, 57, 60], 4)
        # What lies behind a request's last page is no page.
        pages[torch.arange(8) > torch.from_numpy((lens - 1) // SIZE)[:, None]] = -(10**6)
        for flags in (together, alone):
            flags.set_exact(shown)
        together.decode(np.arange(4), lens, pages)
        for slot in range(4):
            decode(alone, slot, int(lens[slot]), pages[slot])
        assert torch.equal(together.read(torch.arange(32)), alone.read(torch.arange(32)))
