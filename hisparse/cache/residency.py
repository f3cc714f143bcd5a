"""Tracks how many device pages each request owns; changes apply only between forwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.capacity import RowCapacities
from hisparse.cache.device_pool import DevicePool
from hisparse.kernels import drop_pages, rebalance, reset_rows, verify_capacity


class Residency:
    """Applies resets and capacity changes to the device tables.

    Requests come and go at schedule time, while an earlier forward may still be running.
    :meth:`begin`, :meth:`end` and :meth:`replace_pages` therefore only note the change;
    :meth:`start_forward` and :meth:`drop_replaced` apply them on the forward stream.

    Args:
        device: the device pages and the rows' tables.
        capacities: decides the capacity of each row, on the host.
        checked: verify that each row got its capacity; waits for the device.

    Attributes:
        capacities: as given.
    """

    def __init__(
        self, device: DevicePool, capacities: RowCapacities, *, checked: bool = False
    ) -> None:
        self.capacities = capacities
        self._checked = checked
        self._device = device
        num_slots = device.capacity.shape[0] // device.heads
        # Device pages by request slot: the full pages of the context, the largest need without a
        # new division, and the capacity of each row.
        self._needs, self._covered, self._held = np.zeros((3, num_slots), dtype=np.int64)
        self._resets: set[int] = set()
        self._cold: set[int] = set()
        # By request slot, the host pages of the last prefill, and slots where these may be others.
        self._host_pages: dict[int, Tensor] = {}
        self._replaced: set[int] = set()
        self._changed = False

    def begin(self, slot: int) -> None:
        """Start a request in a slot; the slot's rows still hold pages of an earlier request."""
        self._resets.add(slot)
        self._needs[slot] = 0
        self._cold.add(slot)
        self._host_pages.pop(slot, None)
        self.capacities.begin(slot)
        self._changed = True

    def end(self, slot: int) -> None:
        """End a request; the next forward returns its device pages to the pool."""
        self.capacities.end(slot)
        self._host_pages.pop(slot, None)
        self._changed = True

    def replace_pages(self, slot: int) -> None:
        """Note that a request may have other host pages for tokens that are already computed."""
        self._replaced.add(slot)

    def keep_pages(self, slot: int, host_pages: Tensor) -> None:
        """Keep the host pages ``[P] int32`` of a prefill, to see later which ones were replaced."""
        self._host_pages[slot] = host_pages

    def drop_replaced(self, slots: np.ndarray, host_pages: Sequence[Tensor] | Tensor) -> None:
        """Drop resident pages whose host page was replaced, so that they are read from the new one.

        Both host pages were computed from the same tokens, but not in the same batch: what a
        request attends must not depend on which of its pages are resident.

        Args:
            slots: ``[B]``, request slots of this forward.
            host_pages: for each request ``[P] int32``, the host pages now.
        """
        if not self._replaced:
            return
        for slot, now in zip(slots.tolist(), host_pages, strict=True):
            before = self._host_pages.get(slot)
            if slot in self._replaced and before is not None:
                now = now[: len(before)].clone()
                replaced = before != now
                # A GPU is not asked, which would take as long as the forward before this one.
                if replaced.is_cuda or bool(replaced.any()):
                    drop_pages(self._state_rows([slot]), replaced, self._device.states)
                    self._host_pages[slot] = now
            self._replaced.discard(slot)

    def is_cold(self, slot: int) -> bool:
        """Whether a request has no resident pages because none of its prefills has ended."""
        return slot in self._cold

    def mark_warm(self, slots: Iterable[int]) -> None:
        """Record that a prefill of these requests has ended."""
        self._cold.difference_update(slots)

    def held(self, slots: np.ndarray) -> np.ndarray:
        """Device pages that each row of the request slots ``[B]`` holds, ``[B]``."""
        pages: np.ndarray = self._held[slots]
        return pages

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Reset the rows of new requests, and fit capacities to the running requests.

        Args:
            slots: ``[B]``, request slots of this forward.
            needs: ``[B]``, full pages of each context after the forward.
        """
        self._needs[slots] = needs
        if self._resets:
            rows = self._state_rows(sorted(self._resets))
            reset_rows(rows, self._device.capacity, self._device.states)
            self._resets.clear()
        if not self._changed and (needs <= self._covered[slots]).all():
            return
        self._changed = False
        live = self.capacities.live
        changes = self.capacities.fit({slot: int(self._needs[slot]) for slot in live})
        self._covered[list(live)] = [self.capacities.covered_need(slot) for slot in live]
        if changes:
            self._apply(changes)

    def _apply(self, changes: list[tuple[int, int]]) -> None:
        """Set the capacities ``(request slot, device pages)`` on the device."""
        device = self._device
        slots, pages = [slot for slot, _ in changes], [new for _, new in changes]
        self._held[slots] = pages
        rows = self._state_rows(slots)
        row_pages = torch.tensor(pages, dtype=torch.int32).repeat_interleave(device.heads)
        new = row_pages.to(device.device)
        free_pages, num_free = device.free_pages, device.num_free
        rebalance(rows, new, device.capacity, device.states, free_pages, num_free)
        if self._checked:
            verify_capacity(rows, new, device.capacity, num_free)

    def _state_rows(self, slots: list[int]) -> Tensor:
        heads = self._device.heads
        rows = [slot * heads + head for slot in slots for head in range(heads)]
        return torch.tensor(rows, dtype=torch.int64, device=self._device.device)
