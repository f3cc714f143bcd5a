"""Replay of recorded selections: each policy equals its oracle, on random traces."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import KernelError
from hisparse.kernels import POLICIES, Selections, replay, stack_depths
from tests.kernels.lru_oracle import LruOracle

#: Selections of a stream, each with the complete pages of its context.
Stream = list[tuple[list[int], int]]


def selections(*streams: Stream) -> Selections:
    rows = [row for stream in streams for row in stream]
    return Selections(
        torch.tensor([page for pages, _ in rows for page in pages], dtype=torch.int32),
        torch.tensor([0, *itertools.accumulate(len(pages) for pages, _ in rows)]),
        torch.tensor([0, *itertools.accumulate(len(stream) for stream in streams)]),
        torch.tensor([full for _, full in rows], dtype=torch.int32),
    )


@st.composite
def streams(draw: st.DrawFn, widest: int = 5) -> Stream:
    """A context that grows, and selections of its pages; or one that starts with no page."""
    full = draw(st.integers(1, 12))
    cold = draw(st.booleans())
    stream: Stream = []
    for _ in range(draw(st.integers(1, 25))):
        pages = draw(st.sets(st.integers(0, full - 1), max_size=widest))
        stream.append((sorted(pages), 0 if cold else full))
        full += draw(st.sampled_from([0, 0, 0, 1, 2]))
    return stream


@given(st.lists(streams(), min_size=1, max_size=3), st.sampled_from(POLICIES))
def test_policies_equal_their_oracles(given: list[Stream], policy: str) -> None:
    trace, sizes = selections(*given), [5, 6, 8, 11, 40]
    expected = replay(trace, policy, sizes, impl="reference")
    assert torch.equal(replay(trace, policy, sizes), expected)


@given(st.lists(streams(), min_size=1, max_size=3), st.integers(1, 20))
def test_stack_depths_equal_their_oracle(given: list[Stream], depth: int) -> None:
    trace = selections(*given)
    assert torch.equal(stack_depths(trace, depth), stack_depths(trace, depth, impl="reference"))


@given(streams(), st.integers(5, 12))
def test_lru_is_the_rule_of_lru_diff(stream: Stream, size: int) -> None:
    """Warm starts and completed pages included: the oracle of ``lru_diff`` counts the same hits."""
    oracle, full, hits = LruOracle(size), 0, 0
    for at, (pages, now) in enumerate(stream):
        if at == 0:
            oracle.step(list(range(max(0, now - size), now)), list(range(now)))
        else:
            for page in range(full, now):
                oracle.promote(page)
        full = now
        hits += int(oracle.step(pages, list(range(64)))["hits"])
    assert replay(selections(stream), "lru", [size]).item() == hits


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_single_accesses_are_the_lru_of_the_textbook(accesses: list[int]) -> None:
    """A selection of one page at a time: an OrderedDict, for all sizes from one pass."""
    trace = selections([([page], 0) for page in accesses])
    counts = stack_depths(trace, 12)[0]
    for size in range(1, 12):
        held, hits = OrderedDict[int, None](), 0
        for page in accesses:
            hits += page in held
            held[page] = None
            held.move_to_end(page)
            if len(held) > size:
                held.popitem(last=False)
        assert replay(trace, "lru", [size]).item() == hits == counts[:size].sum().item()


@given(streams())
def test_belady_is_never_below_lru(stream: Stream) -> None:
    trace, sizes = selections(stream), [5, 6, 8, 11]
    best = replay(trace, "belady", sizes)
    assert (replay(trace, "lru", sizes) <= best).all()
    assert (stack_depths(trace, 40).cumsum(1)[:, [4, 5, 7, 10]] <= best).all()


@given(streams(widest=2))
def test_belady_is_the_best_of_all_choices(stream: Stream) -> None:
    """Every set of pages that a cache of 3 may keep is tried."""

    def contents(held: frozenset[int], new: list[int], pinned: list[int]) -> set[frozenset[int]]:
        everything = held | set(new)
        free = sorted(everything - set(pinned))
        keep = min(len(everything), 3) - len(set(pinned))
        return {frozenset([*pinned, *c]) for c in itertools.combinations(free, keep)}

    size, full = 3, stream[0][1]
    states = {frozenset(range(max(0, full - size), full)): 0}
    for pages, now in stream[:12]:
        for page in range(full, now):
            states = {
                after: max(h for s, h in states.items() if after in contents(s, [page], [page]))
                for s in states
                for after in contents(s, [page], [page])
            }
        full = now
        states = {
            after: max(
                h + len(s & set(pages))
                for s, h in states.items()
                if after in contents(s, pages, pages)
            )
            for s in states
            for after in contents(s, pages, pages)
        }
    best = replay(selections(stream[:12]), "belady", [size]).item()
    assert best == max(states.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": torch.tensor([0, -1], dtype=torch.int32)}, "got a negative number"),
        ({"offsets": torch.tensor([0, 2, 1])}, "offsets: expected ascending numbers from 0 to 2"),
        ({"streams": torch.tensor([0, 0, 2])}, "streams: expected ascending numbers from 0 to 2"),
        ({"pages": torch.tensor([0, 1])}, "pages: got dtype torch.int64"),
    ],
    ids=["negative", "offsets", "empty stream", "dtype"],
)
def test_wrong_selections_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    trace = selections([([0], 0), ([1], 0)])._replace(**change)
    with pytest.raises(KernelError, match=message):
        replay(trace, "lru", [4])


def test_wrong_sizes_and_policies_are_refused() -> None:
    trace = selections([([0, 1], 4)])
    with pytest.raises(KernelError, match="at least the 2 of the longest selection"):
        replay(trace, "lru", [1])
    with pytest.raises(KernelError, match="unknown policy 'mru'"):
        replay(trace, "mru", [4])
    with pytest.raises(KernelError, match="depth: got 0"):
        stack_depths(trace, 0)
