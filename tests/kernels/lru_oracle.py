"""The LRU rules of the design once more, with an ``OrderedDict`` per row and no tensors."""

from __future__ import annotations

from collections import OrderedDict


class LruOracle:
    """One row of one layer: slots from cold to hot, each with the page that it holds or None."""

    def __init__(self, capacity: int) -> None:
        self.slots: OrderedDict[int, int | None] = OrderedDict((s, None) for s in range(capacity))

    def step(
        self, selection: list[int], host_pages: list[int], *, waits: bool = True
    ) -> dict[str, list[int] | int]:
        """One ``diff_tables`` of the row; the outputs without their padding at the end."""
        wanted = list(dict.fromkeys(p for p in selection if p >= 0))
        where = {page: slot for slot, page in self.slots.items() if page is not None}
        hits = {where[p] for p in wanted if p in where}
        misses = [p for p in wanted if p not in where]
        away = [] if waits else misses
        victims = [slot for slot in self.slots if slot not in hits][: len(misses)]
        for slot, page in zip(victims, misses, strict=True):
            self.slots[slot] = page
            self.slots.move_to_end(slot)
            where[page] = slot
        for slot in [s for s in self.slots if s in hits]:
            self.slots.move_to_end(slot)
        return {
            "current": [where[p] if p >= 0 else -1 for p in selection if p not in away],
            "load_host": [host_pages[p] for p in misses],
            "load_slots": victims,
            "hits": len(hits),
            "misses": len(misses),
            "away": len(away),
        }

    def reset(self) -> None:
        self.slots = OrderedDict((s, None) for s in range(len(self.slots)))

    def promote(self, page: int) -> int:
        """The tail page enters as hottest; returns the slot that it takes over."""
        coldest = next(iter(self.slots))
        self.slots[coldest] = page
        self.slots.move_to_end(coldest)
        return coldest

    def resize(self, capacity: int) -> None:
        """Drop the coldest or gain empty slots, then number the slots from cold to hot."""
        pages = list(self.slots.values())
        gained = capacity - len(pages)
        pages = [None] * gained + pages if gained > 0 else pages[-gained:]
        self.slots = OrderedDict(enumerate(pages))
