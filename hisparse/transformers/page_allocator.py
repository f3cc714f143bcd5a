"""Allocates host pages and counts the rows that share each page."""

from __future__ import annotations

import numpy as np

from hisparse.errors import CapacityError


class HostPageAllocator:
    """Allocates host pages with reference counts. A page is free once no row owns it.

    Page 0 is the pool's padding page and is never allocated.

    Args:
        num_pages: number of pages to allocate from; their ids are 1 to ``num_pages``.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack with the lowest id on top: the system commits a pool's memory on first use.
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = num_pages
        self._num_owners = np.zeros(num_pages + 1, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Number of pages that no row owns."""
        return self._num_free

    def require(self, count: int) -> None:
        """Raise ``CapacityError`` if fewer than ``count`` pages are free."""
        if count > self._num_free:
            raise CapacityError(
                f"host pages: got {count} to allocate, expected at most the {self._num_free} that "
                f"are free of {self.num_pages}; reset a cache or a fork, or raise max_tokens"
            )

    def allocate(self, count: int) -> np.ndarray:
        """Allocate pages with one owner each.

        Returns:
            ``[count] int32`` page ids.

        Raises:
            CapacityError: fewer pages are free; none is allocated.
        """
        self.require(count)
        self._num_free -= count
        pages: np.ndarray = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._num_owners[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Add one owner to each of ``pages [n] int32``; two owners to a page listed twice."""
        np.add.at(self._num_owners, pages, 1)

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one owner. No owner may write to a shared page."""
        return bool(self._num_owners[page] > 1)

    def free(self, pages: np.ndarray) -> None:
        """Remove one owner from each of ``pages [n] int32``."""
        np.subtract.at(self._num_owners, pages, 1)
        unowned = np.unique(pages[self._num_owners[pages] == 0])[::-1]
        self._free[self._num_free : self._num_free + unowned.size] = unowned
        self._num_free += unowned.size
