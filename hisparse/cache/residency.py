"""Which request owns how many device pages; changed only between forwards."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.capacity import RowCapacities
from hisparse.cache.device_pool import DevicePool
from hisparse.kernels import rebalance, reset_rows, verify_capacity

__all__ = ["Residency"]


class Residency:
    """Applies resets and capacity changes to the device tables.

    Requests come and go at schedule time, while an earlier forward may still be running.
    :meth:`begin` and :meth:`end` therefore only note the change; :meth:`start_forward` applies all
    of them on the forward stream.

    Args:
        device: the device pages and the rows' tables.
        capacities: decides the capacity of each row, on the host.
        checked: verify that each row got its capacity, which waits for the device.

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
        # Device pages by request slot: those a context fills, those that need no new decision,
        # and those the rows hold.
        self._needs, self._enough, self._held = np.zeros((3, num_slots), dtype=np.int64)
        self._resets: set[int] = set()
        self._cold: set[int] = set()
        self._changed = False

    def begin(self, slot: int) -> None:
        """A request takes over a request slot; the slot's rows hold another request's pages."""
        self._resets.add(slot)
        self._needs[slot] = 0
        self._cold.add(slot)
        self.capacities.begin(slot)
        self._changed = True

    def end(self, slot: int) -> None:
        """A request is over; its device pages go back to the pool at the next forward."""
        self.capacities.end(slot)
        self._changed = True

    def is_cold(self, slot: int) -> bool:
        """Whether a request has not been through a prefill yet, so nothing of it is resident."""
        return slot in self._cold

    def warmed(self, slots: Iterable[int]) -> None:
        """A prefill of these requests is done."""
        self._cold.difference_update(slots)

    def held(self, slots: np.ndarray) -> np.ndarray:
        """Device pages that each row of the request slots ``[B]`` holds, ``[B]``."""
        pages: np.ndarray = self._held[slots]
        return pages

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Clear the rows that changed hands, and fit capacities to the running requests.

        Args:
            slots: ``[B]``, request slots of this forward.
            needs: ``[B]``, full pages that each context has after the forward.
        """
        self._needs[slots] = needs
        if self._resets:
            rows = self._state_rows(sorted(self._resets))
            reset_rows(rows, self._device.capacity, self._device.states)
            self._resets.clear()
        if not self._changed and (needs <= self._enough[slots]).all():
            return
        self._changed = False
        live = self.capacities.live
        changes = self.capacities.fit({slot: int(self._needs[slot]) for slot in live})
        self._enough[list(live)] = [self.capacities.enough(slot) for slot in live]
        if changes:
            self._apply(changes)

    def _apply(self, changes: list[tuple[int, int]]) -> None:
        """Change capacities: ``(request slot, device pages)``."""
        device = self._device
        slots, pages = [slot for slot, _ in changes], [new for _, new in changes]
        self._held[slots] = pages
        rows = self._state_rows(slots)
        by_row = torch.tensor(pages, dtype=torch.int32).repeat_interleave(device.heads)
        new = by_row.to(device.device)
        free_pages, num_free = device.free_pages, device.num_free
        rebalance(rows, new, device.capacity, device.states, free_pages, num_free)
        if self._checked:
            verify_capacity(rows, new, device.capacity, num_free)

    def _state_rows(self, slots: list[int]) -> Tensor:
        heads = self._device.heads
        rows = [slot * heads + head for slot in slots for head in range(heads)]
        return torch.tensor(rows, dtype=torch.int64, device=self._device.device)
