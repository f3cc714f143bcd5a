"""Replay of prefix traces through caches of several capacities, policies and lifetimes."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hisparse.trace.prefix import PrefixTrace

__all__ = ["PREFIX_POLICIES", "PrefixPoint", "on_front", "replay_prefix"]

PREFIX_POLICIES: Final = ("lru", "fifo", "lfu")


@dataclass(frozen=True, kw_only=True)
class PrefixPoint:
    """A cache and what it would have held.

    Attributes:
        policy: "lru", "fifo" or "lfu".
        capacity: tokens; None: unlimited.
        ttl_s: seconds that a block stays after its last use; None: for ever.
        hit_ratio: prompt tokens that the cache held, of all prompt tokens.
        peak_tokens: the most tokens that it held.
    """

    policy: str
    capacity: int | None
    ttl_s: float | None
    hit_ratio: float
    peak_tokens: int


class _Blocks:
    """Blocks in a cache: "lru" by last use, "fifo" by insertion, "lfu" by number of uses."""

    def __init__(self, policy: str, capacity: int | None, ttl_ms: float | None) -> None:
        self._policy, self._capacity, self._ttl = policy, capacity, ttl_ms
        #: Last use of each block, in the order of eviction for "lru" and "fifo".
        self._used: OrderedDict[int, float] = OrderedDict()
        #: Last uses in the order of time, for expiry.
        self._uses: OrderedDict[int, float] = OrderedDict()
        self._counts: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._tick = 0
        self.peak = 0

    def __contains__(self, block: int) -> bool:
        return block in self._used

    def expire(self, now: float) -> None:
        while self._ttl is not None and self._uses:
            block, last = next(iter(self._uses.items()))
            if now - last <= self._ttl:
                break
            self._drop(block)

    def use(self, block: int, now: float) -> None:
        """Insert a block, or use it again; others leave if the cache is full."""
        again = block in self._used
        if not again and self._capacity is not None:
            if self._capacity == 0:
                return
            if len(self._used) >= self._capacity:
                self._drop(self._victim())
        self._used[block] = self._uses[block] = now
        self._uses.move_to_end(block)
        if self._policy == "lru":
            self._used.move_to_end(block)
        if self._policy == "lfu":
            self._tick += 1
            count = self._counts[block][0] + 1 if again else 1
            self._counts[block] = (count, self._tick)
            heapq.heappush(self._heap, (count, self._tick, block))
        self.peak = max(self.peak, len(self._used))

    def _victim(self) -> int:
        if self._policy != "lfu":
            return next(iter(self._used))
        while True:
            count, tick, block = heapq.heappop(self._heap)
            if self._counts.get(block) == (count, tick):
                return block

    def _drop(self, block: int) -> None:
        del self._used[block], self._uses[block]
        self._counts.pop(block, None)


def replay_prefix(
    trace: PrefixTrace, policy: str, capacity: int | None, ttl_s: float | None
) -> PrefixPoint:
    """Replay a trace through one cache.

    A request hits the blocks at its beginning that the cache holds, up to the first that it does
    not hold. Then all blocks of its prompt are used, the last one first: of a prefix, the end
    leaves the cache before the beginning.

    Args:
        trace: the trace.
        policy: one of ``PREFIX_POLICIES``.
        capacity: tokens; None: unlimited.
        ttl_s: seconds that a block stays after its last use; None: for ever.
    """
    size = trace.block_size
    held = None if capacity is None else capacity // size
    cache = _Blocks(policy, held, None if ttl_s is None else 1000 * ttl_s)
    found = total = 0
    for request in trace.requests:
        cache.expire(request.timestamp)
        hits = 0
        while hits < len(request.hash_ids) and request.hash_ids[hits] in cache:
            hits += 1
        found += min(hits * size, request.input_length)
        total += request.input_length
        for block in reversed(request.hash_ids):
            cache.use(block, request.timestamp)
    return PrefixPoint(
        policy=policy,
        capacity=capacity,
        ttl_s=ttl_s,
        hit_ratio=found / max(1, total),
        peak_tokens=cache.peak * size,
    )


def on_front(points: Sequence[PrefixPoint]) -> list[bool]:
    """Whether no other cache holds at most as much and hits at least as often, one strictly."""

    def worse(a: PrefixPoint, b: PrefixPoint) -> bool:
        better = (-b.hit_ratio, b.peak_tokens), (-a.hit_ratio, a.peak_tokens)
        return all(x <= y for x, y in zip(*better, strict=True)) and better[0] != better[1]

    return [not any(worse(point, other) for other in points) for point in points]
