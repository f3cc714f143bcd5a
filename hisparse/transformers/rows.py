"""Rows of a cache and of its forks: request slots, host pages, and what is resident of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.coordinator import SparseCoordinator
from hisparse.errors import CapacityError
from hisparse.transformers.page_allocator import HostPageAllocator

__all__ = ["RowStore"]


class RowStore:
    """Request slots and their host pages; a cache and its forks share one store.

    Lengths are the caller's: a method that needs them takes them, in tokens, one per slot.

    Args:
        coordinator: serves the rows.
        max_rows: request slots to give out, 1 to ``max_rows``.
        row_pages: pages that one row may have.
        num_pages: host pages of all rows together.
        device: where the coordinator's tensors lie.
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
        self._table = np.zeros((max_rows + 1, row_pages), dtype=np.int32)
        self._free_slots = list(range(max_rows, 0, -1))

    def open(self, count: int) -> np.ndarray:
        """``[count] int64``, request slots of new, empty rows.

        Raises:
            CapacityError: there are not so many.
        """
        if count > len(self._free_slots):
            raise CapacityError(
                f"rows: got {count} new ones, expected at most {len(self._free_slots)}: "
                f"max_batch_size is {self.max_rows} and counts the rows of a cache and of its forks"
            )
        slots = [self._free_slots.pop() for _ in range(count)]
        for slot in slots:
            self.coordinator.on_request_begin(slot)
        return np.array(slots, dtype=np.int64)

    def close(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Rows are over: their slots and host pages go back."""
        self._drop_pages(slots, lengths, np.zeros_like(lengths))
        for slot in slots.tolist():
            self.coordinator.on_request_end(slot)
            self._free_slots.append(slot)

    def num_pages(self, lengths: np.ndarray) -> np.ndarray:
        """Pages that so many tokens take."""
        pages: np.ndarray = -(-lengths // self.page_size)
        return pages

    def _cells(
        self, slots: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where pages ``first`` to ``last - 1`` of each slot stand in the table."""
        count = last - first
        behind = np.repeat(count.cumsum() - count, count)
        column = np.arange(count.sum()) - behind + np.repeat(first, count)
        return np.repeat(slots, count), column

    def grow(self, slots: np.ndarray, lengths: np.ndarray, new_lengths: np.ndarray) -> None:
        """Give rows the pages that ``new_lengths`` take.

        Raises:
            CapacityError: there are not so many; nothing has changed.
        """
        cells = self._cells(slots, self.num_pages(lengths), self.num_pages(new_lengths))
        self._table[cells] = self.pages.allocate(cells[0].size)

    def _drop_pages(self, slots: np.ndarray, lengths: np.ndarray, new_lengths: np.ndarray) -> None:
        cells = self._cells(slots, self.num_pages(new_lengths), self.num_pages(lengths))
        self.pages.free(self._table[cells])

    def shrink(self, slots: np.ndarray, lengths: np.ndarray, new_lengths: np.ndarray) -> None:
        """Take rows back to ``new_lengths``.

        What is resident of them is forgotten, and what algorithms keep of a request, not of its
        pages: it may speak of tokens that are gone.
        """
        self._drop_pages(slots, lengths, new_lengths)
        for slot, length in zip(slots.tolist(), new_lengths.tolist(), strict=True):
            self.coordinator.on_request_begin(slot)
            last = length // self.page_size
            if length % self.page_size and self.pages.is_shared(self._table[slot, last]):
                self._own_tail(slot, length)
            self.fill_tail(slot, length)

    def fork(self, slots: np.ndarray, lengths: np.ndarray, count: int) -> np.ndarray:
        """``[B * count]``, slots of ``count`` new rows for each slot, which share its full pages.

        Raises:
            CapacityError: there are not so many slots, or no pages for the copies of the tails.
        """
        parents, lengths = np.repeat(slots, count), np.repeat(lengths, count)
        self.pages.require(int((lengths % self.page_size > 0).sum()))
        children = self.open(parents.size)
        self._table[children] = self._table[parents]
        held = self._cells(children, np.zeros_like(lengths), self.num_pages(lengths))
        self.pages.share(self._table[held])
        for parent, slot, length in zip(
            parents.tolist(), children.tolist(), lengths.tolist(), strict=True
        ):
            self.coordinator.representations.fork(parent, slot)
            if length % self.page_size:
                self._own_tail(slot, length)
            self.fill_tail(slot, length)
        return children

    def _own_tail(self, slot: int, length: int) -> None:
        """Let a row write to its last page, which it shares: copy the tokens that it has there."""
        last, tail = divmod(length, self.page_size)
        shared = self._table[slot, last : last + 1].copy()
        own = self.pages.allocate(1)
        kv_io, kv = self.coordinator.manager.kv_io, self.coordinator.policy.kv
        source, target = (
            torch.arange(tail, device=self.device) + int(page[0]) * self.page_size
            for page in (shared, own)
        )
        for layer in range(kv.num_layers):
            kv_io.write(layer, target, *kv_io.read_tokens(layer, source))
        self.pages.free(shared)
        self._table[slot, last] = own[0]

    def fill_tail(self, slot: int, length: int) -> None:
        """Bring the tokens of a row's last, partial page onto the device."""
        last, tail = divmod(length, self.page_size)
        if not tail:
            return
        kv_io = self.coordinator.manager.kv_io
        slots = self.host_slots(
            np.array([slot]), np.array([last * self.page_size]), np.array([tail])
        )
        for layer in range(self.coordinator.policy.kv.num_layers):
            kv_io.write_tail(layer, slot, *kv_io.read_tokens(layer, slots))

    def host_slots(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> Tensor:
        """Host slots of ``counts`` tokens of each row from ``starts`` on, ``[tokens] int64``."""
        position = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        position += np.repeat(starts, counts)
        pages = self._table[np.repeat(slots, counts), position // self.page_size]
        found = pages.astype(np.int64) * self.page_size + position % self.page_size
        return torch.from_numpy(found).to(self.device)

    def page_table(self, slots: np.ndarray, num_pages: int) -> Tensor:
        """``[B, num_pages] int32``, a copy; what stands beyond a row's pages is left over."""
        return torch.from_numpy(self._table[slots, :num_pages]).to(self.device)
