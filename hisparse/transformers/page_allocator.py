"""Which host pages are free, and how many rows share each of the others."""

from __future__ import annotations

import numpy as np

from hisparse.errors import CapacityError

__all__ = ["HostPageAllocator"]


class HostPageAllocator:
    """Hands out host pages; a page goes back when the last row that shares it lets go.

    Page 0 is the padding page of the pool and is never handed out.

    Args:
        num_pages: pages to hand out; their ids are 1 to ``num_pages``.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack whose top is the lowest id: memory of a pool is committed as it is touched.
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = num_pages
        self._owners = np.zeros(num_pages + 1, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Pages that no row holds."""
        return self._num_free

    def require(self, count: int) -> None:
        """``CapacityError`` if so many pages are not free."""
        if count > self._num_free:
            raise CapacityError(
                f"host pages: got {count} to allocate, expected at most the {self._num_free} that "
                f"are free of {self.num_pages}; reset a cache or a fork, or raise max_tokens"
            )

    def allocate(self, count: int) -> np.ndarray:
        """``[count] int32``, pages of one owner each.

        Raises:
            CapacityError: fewer are free; nothing was handed out.
        """
        self.require(count)
        self._num_free -= count
        pages: np.ndarray = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._owners[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """``pages [n] int32`` get one more owner; a page that stands there twice gets two."""
        np.add.at(self._owners, pages, 1)

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one owner, so that none of them may write to it."""
        return bool(self._owners[page] > 1)

    def free(self, pages: np.ndarray) -> None:
        """``pages [n] int32`` lose one owner each."""
        np.subtract.at(self._owners, pages, 1)
        unowned = np.unique(pages[self._owners[pages] == 0])[::-1]
        self._free[self._num_free : self._num_free + unowned.size] = unowned
        self._num_free += unowned.size
