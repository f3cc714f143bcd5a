"""Request slots, host pages and tail pages of the rows of a cache and its forks."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.coordinator import SparseCoordinator
from hisparse.errors import CapacityError
from hisparse.kernels import upload


class HostPageAllocator:
    """Allocates pages 1 to ``num_pages`` of a host pool, with reference counts.

    A page is free once no row owns it. Page 0 is the pool's padding page.
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
        """Allocate pages with one owner each: ``[count] int32``; none if fewer are free."""
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


class RowStore:
    """Request slots and their host pages. A cache and its forks share one store.

    Args:
        coordinator: the engine of the rows.
        max_rows: number of request slots; their ids are 1 to ``max_rows``.
        row_pages: maximum number of host pages per row.
        num_pages: host pages of all rows together.
        device: device of the coordinator's tensors.

    Attributes:
        coordinator, max_rows, device: as given.
        lengths: ``[slots] int64``, tokens of the row in each request slot.
    """

    def __init__(
        self,
        coordinator: SparseCoordinator,
        *,
        max_rows: int,
        row_pages: int,
        num_pages: int,
        device: torch.device,
    ) -> None:
        self.coordinator = coordinator
        self.max_rows = max_rows
        self.device = device
        self.pages = HostPageAllocator(num_pages)
        self.page_size = coordinator.policy.kv.page_size
        #: Called before each forward.
        self.check_forward: Callable[[], None] = lambda: None
        self.lengths = np.zeros(max_rows + 1, dtype=np.int64)
        self._table = np.zeros((max_rows + 1, row_pages), dtype=np.int32)
        self._free_slots = list(range(max_rows, 0, -1))

    def open(self, count: int, length: int = 0) -> np.ndarray:
        """Begin ``count`` rows of ``length`` tokens each, whose K and V the caller writes.

        Returns:
            ``[count] int64`` request slots.

        Raises:
            CapacityError: fewer slots or host pages are free; nothing has changed.
        """
        if count > len(self._free_slots):
            raise CapacityError(
                f"rows: got {count} new rows, expected at most {len(self._free_slots)}: "
                f"max_batch_size is {self.max_rows} and counts the rows of a cache and of its forks"
            )
        slots = np.array(self._free_slots[: -count - 1 : -1], dtype=np.int64)
        self.lengths[slots] = 0
        self.grow(slots, np.full(count, length))
        del self._free_slots[len(self._free_slots) - count :]
        for slot in slots.tolist():
            self.coordinator.on_request_begin(slot)
        return slots

    def close(self, slots: np.ndarray) -> None:
        """End the rows of ``slots [n]``; free their slots and host pages."""
        self._drop_pages(slots, np.zeros_like(slots))
        for slot in slots.tolist():
            self.coordinator.on_request_end(slot)
            self._free_slots.append(slot)

    def num_pages(self, lengths: np.ndarray) -> np.ndarray:
        """Number of pages that hold ``lengths`` tokens, elementwise."""
        pages: np.ndarray = -(-lengths // self.page_size)
        return pages

    def grow(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Allocate host pages for ``counts [n]`` more tokens of ``slots [n]``.

        Raises:
            CapacityError: fewer pages are free; nothing has changed.
        """
        lengths = self.lengths[slots]
        index = _ranges(slots, self.num_pages(lengths), self.num_pages(lengths + counts))
        self._table[index] = self.pages.allocate(index[0].size)
        self.lengths[slots] = lengths + counts

    def _drop_pages(self, slots: np.ndarray, new_lengths: np.ndarray) -> None:
        last = self.num_pages(self.lengths[slots])
        self.pages.free(self._table[_ranges(slots, self.num_pages(new_lengths), last)])
        self.lengths[slots] = new_lengths

    def shrink(self, slots: np.ndarray, new_lengths: np.ndarray, *, reused: bool = False) -> None:
        """Shorten the rows of ``slots [n]`` to ``new_lengths [n]`` tokens.

        They stay the same rows, so no choice counts again. ``reused`` says that what is left comes
        from a store.

        The rows lose their device pages, and algorithms forget their state of the request, which
        may depend on removed tokens. Representations of the remaining pages stay.
        """
        self._drop_pages(slots, new_lengths)
        for slot, length in zip(slots.tolist(), new_lengths.tolist(), strict=True):
            self.coordinator.on_request_shortened(slot)
            if not reused:
                self.coordinator.choices.keep(slot)
            last = length // self.page_size
            if length % self.page_size and self.pages.is_shared(self._table[slot, last]):
                self._copy_tail(slot)
            self.fill_tail(slot)

    def fork(self, slots: np.ndarray, count: int) -> np.ndarray:
        """Make ``count`` new rows for each slot. They share full pages and copy the tail page.

        Returns:
            ``[B * count] int64`` request slots; the copies of a row are next to each other.

        Raises:
            CapacityError: too few slots are free, or too few pages for the copies.
        """
        parents = np.repeat(slots, count)
        lengths = self.lengths[parents]
        self.pages.require(int((lengths % self.page_size > 0).sum()))
        children = self.open(parents.size)
        self._table[children], self.lengths[children] = self._table[parents], lengths
        index = _ranges(children, np.zeros_like(lengths), self.num_pages(lengths))
        self.pages.share(self._table[index])
        for parent, slot in zip(parents.tolist(), children.tolist(), strict=True):
            self.coordinator.representations.fork(parent, slot)
            if self.lengths[slot] % self.page_size:
                self._copy_tail(slot)
            self.fill_tail(slot)
        return children

    def _copy_tail(self, slot: int) -> None:
        """Replace a row's shared tail page by a copy that the row may write to."""
        last, tail = divmod(int(self.lengths[slot]), self.page_size)
        shared = self._table[slot, last : last + 1].copy()
        copy = self.pages.allocate(1)
        kv_io, kv = self.coordinator.manager.kv_io, self.coordinator.policy.kv
        source, target = (
            torch.arange(tail, device=self.device) + int(page[0]) * self.page_size
            for page in (shared, copy)
        )
        for layer in range(kv.num_layers):
            kv_io.write(layer, target, *kv_io.read_tokens(layer, source))
        self.coordinator.on_page_copied(int(shared[0]), int(copy[0]))
        self.pages.free(shared)
        self._table[slot, last] = copy[0]

    def fill_tail(self, slot: int) -> None:
        """Copy the tokens of a row's tail page from host memory to the device."""
        tail = self.lengths[[slot]] % self.page_size
        if not tail.any():
            return
        kv_io = self.coordinator.manager.kv_io
        slots = self.host_slots(np.array([slot]), self.lengths[[slot]] - tail, tail)
        for layer in range(self.coordinator.policy.kv.num_layers):
            kv_io.write_tail(layer, slot, *kv_io.read_tokens(layer, slots))

    def host_slots(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> Tensor:
        """``[tokens] int64`` host slots of the positions ``starts`` to ``starts + counts - 1``."""
        rows, position = _ranges(slots, starts, starts + counts)
        pages = self._table[rows, position // self.page_size]
        host_slots = pages.astype(np.int64) * self.page_size + position % self.page_size
        return upload(host_slots, self.device)

    def page_table(self, slots: np.ndarray, num_pages: int) -> Tensor:
        """``[B, num_pages] int32`` host pages, copied; entries beyond a row's pages are stale."""
        return upload(self._table[slots, :num_pages], self.device)


def _ranges(slots: np.ndarray, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``first [n]`` to ``end - 1`` of each of ``slots [n]``: the slots and the numbers, ``[m]``."""
    count = end - first
    numbers = np.arange(count.sum()) + np.repeat(first - count.cumsum() + count, count)
    return np.repeat(slots, count), numbers
