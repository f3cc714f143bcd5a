"""Recorded selections, as the operations of replay take them."""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

__all__ = ["POLICIES", "Selections"]

#: Replacement policies that ``replay`` knows.
POLICIES: Final = ("lru", "belady")


class Selections(NamedTuple):
    """Selections of several streams; a stream is one request's row in one layer.

    Attributes:
        pages: ``[N] int32``, the pages of all selections.
        offsets: ``[M + 1] int64``, the first page of each of M selections.
        streams: ``[S + 1] int64``, the first selection of each stream; none is empty.
        full_pages: ``[M] int32``, complete pages of the context at each selection. A stream starts
            with the most recent of them in the cache, as after a prefill; pages that are completed
            between two selections enter it as the hottest. All 0: it starts empty.
    """

    pages: Tensor
    offsets: Tensor
    streams: Tensor
    full_pages: Tensor

    @property
    def num_pages(self) -> int:
        """One more than the largest page."""
        completed = int(self.full_pages.max()) if len(self.full_pages) else 0
        return max(1, completed, int(self.pages.max()) + 1 if len(self.pages) else 0)

    @property
    def widest(self) -> int:
        """Pages of the longest selection."""
        return int(self.offsets.diff().max()) if len(self.offsets) > 1 else 0
