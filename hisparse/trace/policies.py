"""Replay of recorded selections: what caches of other sizes would have held.

All pages of a selection are resident at once: hits are counted before the step, and no page that is
selected is evicted, as in :func:`hisparse.kernels.lru_diff`. A stream starts with the most recent
complete pages of its context in the cache, as after a prefill; pages that are completed between two
selections enter it as the hottest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Selections(NamedTuple):
    """Selections of several streams; a stream is one request's row in one layer.

    Attributes:
        pages: ``[N] int32``, the pages of all selections; those of one selection differ.
        offsets: ``[M + 1] int64``, the first page of each of M selections.
        streams: ``[S + 1] int64``, the first selection of each stream; none is empty.
        full_pages: ``[M] int32``, complete pages of the context at each selection. All 0: the
            stream starts with an empty cache.
    """

    pages: np.ndarray
    offsets: np.ndarray
    streams: np.ndarray
    full_pages: np.ndarray

    @property
    def num_pages(self) -> int:
        """One more than the largest page."""
        return max(1, int(self.full_pages.max(initial=0)), int(self.pages.max(initial=-1)) + 1)

    @property
    def widest(self) -> int:
        """Pages of the longest selection."""
        return int(np.diff(self.offsets).max(initial=0))

    def steps(self, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each selection of a stream, and the pages completed since the one before."""
        full = 0
        for row in range(*self.streams[stream : stream + 2]):
            completed = np.arange(full, self.full_pages[row])
            full += len(completed)
            yield self.pages[slice(*self.offsets[row : row + 2])], completed


def count_hits(selections: Selections, policy: str, sizes: Sequence[int]) -> np.ndarray:
    """Count the hits of a replacement policy in caches of several sizes.

    Args:
        selections: the selections.
        policy: one of ``POLICIES``.
        sizes: pages of each cache, at least those of the longest selection.

    Returns:
        ``[S, len(sizes)] int64``, selected pages that were in the cache.
    """
    streams = range(len(selections.streams) - 1)
    run = POLICIES[policy]
    return np.array([[run(selections, x, size) for size in sizes] for x in streams], np.int64)


def _lru(selections: Selections, stream: int, size: int) -> int:
    """Evict the coldest pages: the exact order of ``lru_diff``."""
    order = np.empty(0, np.int64)  # The coldest first.
    chosen, held = np.zeros((2, selections.num_pages), bool)
    hits = 0
    for pages, completed in selections.steps(stream):
        order = np.concatenate([order, completed[~held[completed]]])[-size:]
        held[:] = False
        held[order] = chosen[pages] = True
        misses, again = pages[~held[pages]], chosen[order]
        spare = order[~again][max(0, len(order) + len(misses) - size) :]
        order = np.concatenate([spare, misses, order[again]])
        hits += len(pages) - len(misses)
        chosen[pages] = False
    return hits


def _belady(selections: Selections, stream: int, size: int) -> int:
    """Evict the page that is selected last of all, so that no policy hits more often."""
    steps = list(selections.steps(stream))
    chosen, held = np.zeros((2, selections.num_pages), bool)
    # Of each page, the step that selects it next; after all steps: none does.
    upcoming = np.full(selections.num_pages, len(steps))
    later = []
    for at, (pages, _) in reversed(list(enumerate(steps))):
        later.append(upcoming[pages])
        upcoming[pages] = at

    def evict(count: int) -> None:
        if count > 0:
            spare = np.flatnonzero(held & ~chosen)
            # Of pages that are selected in the same step, the last one goes first.
            rank = upcoming[spare] * len(held) + spare
            held[spare[rank.argpartition(-count)[-count:]]] = False

    hits = 0
    for at, (pages, completed) in enumerate(steps):
        for page in completed[-size:] if at == 0 else completed:
            evict(held.sum() - size + (not held[page]))
            held[page] = True
        hits += int(held[pages].sum())
        chosen[pages] = True
        evict((held | chosen).sum() - size)
        held[pages] = True
        chosen[pages], upcoming[pages] = False, later.pop()
    return hits


#: Replacement policies by name: the hits of a stream in a cache of a size.
POLICIES: dict[str, Callable[[Selections, int, int], int]] = {"lru": _lru, "belady": _belady}
