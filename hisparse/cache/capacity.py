"""Decides on the host, between steps, how many device pages each running request may hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hisparse.errors import CapacityError, HiSparseError


class RowCapacities:
    """Divides the device pages of a layer among live requests; all layers get the same numbers.

    Each live request gets ``min_pages`` per row. The rest is divided equally among requests that
    need more. Pages that no other request needs stay where they are.

    Args:
        total_pages: device pages of one layer, tail pages not counted.
        rows_per_request: H; each row of a request gets the request's capacity.
        min_pages: smallest capacity of a live request.
        max_pages: largest capacity (C).
        max_requests: largest number of live requests.
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
            raise CapacityError(
                f"max_pages: got {max_pages}, expected at least min_pages ({min_pages})"
            )
        self._rows = rows_per_request
        self._pages = total_pages // rows_per_request
        self._min, self._max, self._max_requests = min_pages, max_pages, max_requests
        self._needs: dict[int, int] = {}
        self._capacity: dict[int, int] = {}
        self._covered: dict[int, int] = {}
        self._changed = False

    @property
    def live(self) -> tuple[int, ...]:
        """Slots of the requests that have begun and not ended."""
        return tuple(self._needs)

    @property
    def live_pages(self) -> int:
        """Device pages of one layer that live requests hold; the next forward frees all others."""
        return self._rows * sum(self._capacity.get(slot, 0) for slot in self._needs)

    def capacity(self, slot: int) -> int:
        """Device pages that each row of a request slot holds as of the last :meth:`fit`."""
        return self._capacity.get(slot, 0)

    def covered_need(self, slot: int) -> int:
        """The largest need of a slot, in pages, for which :meth:`fit` changes no capacity."""
        return self._covered.get(slot, 0)

    def begin(self, slot: int) -> None:
        """Start a request in a slot; it replaces a request that has not ended."""
        if slot not in self._needs and len(self._needs) == self._max_requests:
            raise CapacityError(
                f"live requests: got {self._max_requests + 1} with request slot {slot}, expected "
                f"at most max_requests ({self._max_requests})"
            )
        self._needs[slot] = 0
        self._changed = True

    def end(self, slot: int) -> None:
        """End a request; the next :meth:`fit` frees its pages."""
        self._changed |= self._needs.pop(slot, None) is not None

    def fit(self, needs: Mapping[int, int]) -> list[tuple[int, int]]:
        """Fit capacities to the running requests; called once per forward.

        Args:
            needs: for each live request slot, the device pages that its context fills.

        Returns:
            ``(slot, new capacity)`` of each changed slot; shrinking slots come first.
        """
        for slot, need in needs.items():
            if slot not in self._needs:
                raise HiSparseError(
                    f"request slot {slot}: got a need of {need} pages, expected begin to be called "
                    "before fit"
                )
            self._needs[slot] = need = min(need, self._max)
            if need > self.covered_need(slot):
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
        growth = sum(target - self.capacity(slot) for slot, target in grow.items())
        missing = held + growth - self._pages
        # Requests with the largest surplus shrink first.
        surplus = {slot: self.capacity(slot) - target for slot, target in targets.items()}
        for slot in sorted(surplus, key=surplus.__getitem__, reverse=True):
            if missing <= 0:
                break
            new[slot] = self.capacity(slot) - min(surplus[slot], missing)
            missing -= surplus[slot]
        new |= grow
        changes = [(slot, pages) for slot, pages in new.items() if pages != self.capacity(slot)]
        self._apply(changes)
        return changes

    def _apply(self, changes: list[tuple[int, int]]) -> None:
        self._capacity.update(changes)
        self._capacity = {slot: pages for slot, pages in self._capacity.items() if pages}
        self._covered = {}
        for slot, need in self._needs.items():
            capacity = self.capacity(slot)
            # A request that got less than its need waits until the need exceeds its target.
            self._covered[slot] = capacity if need <= capacity else _with_headroom(need)

    def _targets(self) -> dict[int, int]:
        """Target capacity of each slot: the smallest ones are raised until the pages are used."""
        needs = np.fromiter(self._needs.values(), np.int64)
        held = np.fromiter(map(self.capacity, self._needs), np.int64)
        wanted = np.fromiter(map(_with_headroom, self._needs.values()), np.int64)
        required = needs.clip(self._min, self._max)
        if required.sum() <= self._pages:
            low, high = required, wanted
        else:  # No request gets more headroom while another one lacks pages.
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


def _with_headroom(need: int) -> int:
    """``need`` pages and a sixteenth more, rounded up to the next multiple of 16.

    With this headroom a decoding row changes its capacity only once in some hundred tokens.
    """
    return (need + need // 16) // 16 * 16 + 16
