"""How many device pages each running request may hold, decided on the host between steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hisparse.errors import CapacityError, HiSparseError

__all__ = ["RowCapacities"]


class RowCapacities:
    """Shares out the device pages of a layer; every layer gets the same.

    Each live request gets ``min_pages`` per row. The rest is divided equally among requests that
    need more. Pages that no other request needs stay where they are.

    Args:
        total_pages: device pages of one layer, tail pages not counted.
        rows_per_request: H; each row of a request gets the request's capacity.
        min_pages: capacity that every live request has at least.
        max_pages: largest capacity (C).
        max_requests: requests that may be live at once.
    """

    def __init__(
        self,
        total_pages: int,
        rows_per_request: int,
        min_pages: int,
        max_pages: int,
        max_requests: int,
    ) -> None:
        if total_pages < max_requests * rows_per_request * min_pages:
            raise CapacityError(
                f"device pages: got {total_pages} per layer, expected at least max_requests "
                f"({max_requests}) * rows_per_request ({rows_per_request}) * min_pages "
                f"({min_pages})"
            )
        if max_pages < min_pages:
            raise CapacityError(f"max_pages: got {max_pages}, expected min_pages ({min_pages})")
        self._rows = rows_per_request
        self._pages = total_pages // rows_per_request
        self._min, self._max, self._max_requests = min_pages, max_pages, max_requests
        self._needs: dict[int, int] = {}
        self._capacity: dict[int, int] = {}
        self._enough: dict[int, int] = {}
        self._changed = False

    @property
    def live(self) -> tuple[int, ...]:
        """Slots of the requests that have begun and not ended."""
        return tuple(self._needs)

    @property
    def used_pages(self) -> int:
        """Device pages of one layer that rows hold as of the last :meth:`fit`."""
        return self._rows * sum(self._capacity.values())

    @property
    def live_pages(self) -> int:
        """Device pages that rows of live requests hold; all others are free at the next forward."""
        return self._rows * sum(self._capacity.get(slot, 0) for slot in self._needs)

    def capacity(self, slot: int) -> int:
        """Device pages that each row of a request slot holds as of the last :meth:`fit`."""
        return self._capacity.get(slot, 0)

    def enough(self, slot: int) -> int:
        """The largest need of a slot that, on its own, changes no capacity."""
        return self._enough.get(slot, 0)

    def begin(self, slot: int) -> None:
        """A request takes over a slot, also one whose request has not ended."""
        if slot not in self._needs and len(self._needs) == self._max_requests:
            raise CapacityError(
                f"request slot {slot} is one too many: max_requests ({self._max_requests}) are live"
            )
        self._needs[slot] = 0
        self._changed = True

    def end(self, slot: int) -> None:
        """A request is over; its pages are free at the next :meth:`fit`."""
        self._changed |= self._needs.pop(slot, None) is not None

    def fit(self, needs: Mapping[int, int]) -> list[tuple[int, int]]:
        """Fit capacities to what runs; called once per forward.

        Args:
            needs: live request slot to the device pages that its context fills.

        Returns:
            (slot, new capacity) of what changes: what shrinks, then what grows.
        """
        for slot, need in needs.items():
            if slot not in self._needs:
                raise HiSparseError(f"request slot {slot} needs pages, but begin was not called")
            self._needs[slot] = need = min(need, self._max)
            if need > self._enough.get(slot, 0):
                self._changed = True
        if not self._changed:
            return []
        self._changed = False
        return self._rebalance()

    def _rebalance(self) -> list[tuple[int, int]]:
        new = {slot: 0 for slot in self._capacity if slot not in self._needs}
        targets = self._targets()
        grow = {
            slot: target
            for slot, target in targets.items()
            if self.capacity(slot) < min(target, max(self._needs[slot], self._min))
        }
        held = sum(self.capacity(slot) for slot in targets)
        owed = sum(target - self.capacity(slot) for slot, target in grow.items())
        missing = held + owed - self._pages
        # Those that hold the most beyond their target give first.
        beyond = {slot: self.capacity(slot) - target for slot, target in targets.items()}
        for slot in sorted(beyond, key=beyond.__getitem__, reverse=True):
            if missing <= 0:
                break
            new[slot] = self.capacity(slot) - min(beyond[slot], missing)
            missing -= beyond[slot]
        new |= grow
        changes = [(slot, pages) for slot, pages in new.items() if pages != self.capacity(slot)]
        self._apply(changes)
        return changes

    def _apply(self, changes: list[tuple[int, int]]) -> None:
        self._capacity.update(changes)
        self._capacity = {slot: pages for slot, pages in self._capacity.items() if pages}
        self._enough = {}
        for slot, need in self._needs.items():
            capacity = self.capacity(slot)
            # A row that could not get what it needs asks again once it wants more than now.
            self._enough[slot] = capacity if need <= capacity else _wanted(need)

    def _targets(self) -> dict[int, int]:
        """Capacities that use the pages best, by filling up from the lowest."""
        needs = np.fromiter(self._needs.values(), np.int64)
        held = np.fromiter(map(self.capacity, self._needs), np.int64)
        wanted = np.fromiter(map(_wanted, self._needs.values()), np.int64)
        enough = needs.clip(self._min, self._max)
        if enough.sum() <= self._pages:
            low, high = enough, wanted
        else:  # no headroom for who has enough while another lacks
            low = np.full_like(needs, self._min)
            high = np.where(held >= needs, held.clip(max=wanted), wanted)
        high = high.clip(self._min, self._max)
        level, above = self._min, self._max + 1
        while above - level > 1:
            middle = (level + above) // 2
            if np.clip(middle, low, high).sum() <= self._pages:
                level = middle
            else:
                above = middle
        return dict(zip(self._needs, np.clip(level, low, high).tolist(), strict=True))


def _wanted(need: int) -> int:
    """Pages for a context of ``need`` pages and a 16th more, in steps of 16: a row that decodes
    then changes its capacity once in some hundred tokens.
    """
    return (need + need // 16) // 16 * 16 + 16
