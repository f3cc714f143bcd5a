"""Replay in plain Python: the oracle of the C++ kernels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hisparse.kernels.replay.op import Selections

__all__ = ["replay", "stack_depths"]


def stack_depths(selections: Selections, depth: int) -> Tensor:
    """See :func:`hisparse.kernels.stack_depths`."""
    counts = torch.zeros(len(selections.streams) - 1, depth + 1, dtype=torch.int64)
    for stream, histogram in enumerate(counts):
        stack: list[int] = []  # The hottest first.
        for pages, completed in _steps(selections, stream):
            stack = [*reversed(completed), *(page for page in stack if page not in completed)]
            depths = {page: d for d, page in enumerate(stack)}
            for page in pages:
                histogram[min(depth, depths.get(page, depth))] += 1
            again = [page for page in stack if page in pages]
            new = [page for page in reversed(pages) if page not in depths]
            stack = [*again, *new, *(page for page in stack if page not in pages)]
    return counts


def replay(selections: Selections, policy: str, sizes: Sequence[int]) -> Tensor:
    """See :func:`hisparse.kernels.replay`."""
    return torch.tensor(
        [
            [_count_hits(_POLICIES[policy](), size, selections, stream) for size in sizes]
            for stream in range(len(selections.streams) - 1)
        ],
        dtype=torch.int64,
    ).view(-1, len(sizes))


def _steps(selections: Selections, stream: int) -> Iterator[tuple[list[int], list[int]]]:
    """Each selection of a stream, and the pages completed since the one before."""
    full = 0
    for row in range(int(selections.streams[stream]), int(selections.streams[stream + 1])):
        now = int(selections.full_pages[row])
        pages = selections.pages[selections.offsets[row] : selections.offsets[row + 1]]
        yield list(dict.fromkeys(pages.tolist())), list(range(full, now))
        full = max(full, now)


def _count_hits(cache: _Lru, size: int, selections: Selections, stream: int) -> int:
    steps = list(_steps(selections, stream))
    found = 0
    for at, (pages, completed) in enumerate(steps):
        later = [selected for selected, _ in steps[at:]]
        for page in completed[-size:] if at == 0 else completed:
            if page not in cache:
                if len(cache) == size:
                    cache.evict([])
                cache.load(page, later)
        hits = [page for page in pages if page in cache]
        misses = [page for page in pages if page not in cache]
        while len(cache) + len(misses) > size:
            cache.evict(pages)
        for page in misses:
            cache.load(page, later[1:])
        cache.hit(hits, later[1:])
        found += len(hits)
    return found


class _Lru(OrderedDict[int, int]):
    """The coldest page first; the value is for ``_Belady``."""

    def load(self, page: int, later: list[list[int]]) -> None:
        """Add a page; ``later`` are the selections to come."""
        self[page] = 0

    def hit(self, pages: list[int], later: list[list[int]]) -> None:
        """Use resident pages."""
        for page in [page for page in self if page in pages]:
            self.move_to_end(page)

    def evict(self, selected: list[int]) -> None:
        """Remove a page that is not selected."""
        del self[next(page for page in self if page not in selected)]


class _Belady(_Lru):
    """The value is minus the number of selections from the next use to the end."""

    def load(self, page: int, later: list[list[int]]) -> None:
        use = next((at for at, pages in enumerate(later) if page in pages), len(later))
        self[page] = use - len(later)

    def hit(self, pages: list[int], later: list[list[int]]) -> None:
        for page in pages:
            self.load(page, later)

    def evict(self, selected: list[int]) -> None:
        del self[max((p for p in self if p not in selected), key=lambda page: (self[page], page))]


_POLICIES: dict[str, type[_Lru]] = {"lru": _Lru, "belady": _Belady}
