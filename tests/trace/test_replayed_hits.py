"""Replay of recorded selections follows the rule of the engine, on random traces."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hisparse.trace.replay import count_hits
from tests.kernels.lru_oracle import LruOracle

#: Selections of a stream, each with the complete pages of its context.
Stream = list[tuple[list[int], int]]


def hits_of(stream: Stream, size: int) -> int:
    return count_hits([(np.array(pages, np.int32), full) for pages, full in stream], size)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """A context that grows, and selections of its pages; or one that starts with no page."""
    full = draw(st.integers(1, 12))
    cold = draw(st.booleans())
    stream: Stream = []
    for _ in range(draw(st.integers(1, 25))):
        pages = draw(st.sets(st.integers(0, full - 1), max_size=5))
        stream.append((sorted(pages), 0 if cold else full))
        full += draw(st.sampled_from([0, 0, 0, 1, 2]))
    return stream


@given(streams(), st.integers(5, 12))
def test_lru_is_the_rule_of_diff_tables(stream: Stream, size: int) -> None:
    """Warm starts and completed pages included: the oracle of ``diff_tables`` has the same hits."""
    oracle, full, hits = LruOracle(size), 0, 0
    for at, (pages, now) in enumerate(stream):
        if at == 0:
            oracle.step(list(range(max(0, now - size), now)), list(range(now)))
        else:
            for page in range(full, now):
                oracle.promote(page)
        full = now
        hits += oracle.step(pages, list(range(64)))["hits"]
    assert hits_of(stream, size) == hits


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_single_accesses_are_the_lru_of_the_textbook(accesses: list[int]) -> None:
    """A selection of one page at a time: an OrderedDict."""
    for size in range(1, 12):
        held, hits = OrderedDict[int, None](), 0
        for page in accesses:
            hits += page in held
            held[page] = None
            held.move_to_end(page)
            if len(held) > size:
                held.popitem(last=False)
        assert hits_of([([page], 0) for page in accesses], size) == hits
