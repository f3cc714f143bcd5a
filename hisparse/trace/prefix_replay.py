"""Replay of prefix traces through LRU caches of several capacities and lifetimes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError
from hisparse.trace.prefix import PrefixTrace, is_prefix_trace, read_prefix


@dataclass(frozen=True, kw_only=True)
class PrefixPoint:
    """A cache and what it would have held.

    Attributes:
        capacity: tokens; None: unlimited.
        ttl_s: seconds that a block stays after its last use; None: for ever.
        hit_ratio: prompt tokens that the cache held, of all prompt tokens.
        peak_tokens: the most tokens that it held.
    """

    capacity: int | None
    ttl_s: float | None
    hit_ratio: float
    peak_tokens: int


class _Blocks:
    """Blocks in an LRU cache."""

    def __init__(self, capacity: int | None, ttl_ms: float | None) -> None:
        self._capacity, self._ttl = capacity, ttl_ms
        #: Last use of each block, the least recent first.
        self._used: OrderedDict[int, float] = OrderedDict()
        self.peak = 0

    def __contains__(self, block: int) -> bool:
        return block in self._used

    def expire(self, now: float) -> None:
        """Drop the blocks whose time is over."""
        while self._ttl is not None and self._used:
            if now - next(iter(self._used.values())) <= self._ttl:
                break
            self._used.popitem(last=False)

    def use(self, block: int, now: float) -> None:
        """Insert a block, or use it again; another one leaves if the cache is full."""
        if block not in self._used and self._capacity is not None:
            if self._capacity == 0:
                return
            if len(self._used) >= self._capacity:
                self._used.popitem(last=False)
        self._used[block] = now
        self._used.move_to_end(block)
        self.peak = max(self.peak, len(self._used))


def replay_prefix(trace: PrefixTrace, capacity: int | None, ttl_s: float | None) -> PrefixPoint:
    """Replay a trace through one cache.

    A request hits the blocks at its beginning that the cache holds, up to the first that it does
    not hold. Then all blocks of its prompt are used, the last one first: of a prefix, the end
    leaves the cache before the beginning.

    Args:
        trace: the trace.
        capacity: tokens; None: unlimited.
        ttl_s: seconds that a block stays after its last use; None: for ever.
    """
    size = trace.block_size
    held = None if capacity is None else capacity // size
    cache = _Blocks(held, None if ttl_s is None else 1000 * ttl_s)
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


def are_prefixes(files: Sequence[Path]) -> bool:
    """Whether files are prefix traces.

    Raises:
        ConfigError: some are, and others are not.
    """
    kinds = [is_prefix_trace(file) for file in files]
    if any(kinds) and not all(kinds):
        raise ConfigError("got prefix traces and traces of selections, expected one of the two")
    return any(kinds)


def describe_prefix(file: Path, trace: PrefixTrace) -> dict[str, Any]:
    """What a prefix trace holds."""
    requests = trace.requests
    inputs = sum(x.input_length for x in requests)
    known = [(x.cached_length, x.input_length) for x in requests if x.cached_length is not None]
    cached, asked = (sum(column) for column in zip(*known, strict=True)) if known else (0, 0)
    return {
        "file": str(file),
        "source": trace.source,
        "note": trace.note,
        "block_size": trace.block_size,
        "requests": len(requests),
        "seconds": (requests[-1].timestamp - requests[0].timestamp) / 1000,
        "input_tokens": inputs,
        "output_tokens": sum(x.output_length for x in requests),
        "blocks": len({b for x in requests for b in x.hash_ids}),
        "unique_tokens": _count_unique(trace),
        "found_by_server": cached / max(1, asked) if known else None,
        "unlimited_hit_ratio": replay_prefix(trace, None, None).hit_ratio,
    }


def _count_unique(trace: PrefixTrace) -> int:
    """Tokens of the different blocks; the last block of a prompt may be partly filled."""
    tokens: dict[int, int] = {}
    for request in trace.requests:
        left = request.input_length
        for block in request.hash_ids:
            filled = min(left, trace.block_size)
            tokens[block] = max(tokens.get(block, 0), filled)
            left -= filled
    return sum(tokens.values())


def replay_all(
    file: Path, capacities: Sequence[int] | None, ttls: Sequence[float | None]
) -> dict[str, Any]:
    """Replay a prefix trace through each capacity and lifetime.

    Raises:
        ConfigError: the file is damaged.
    """
    trace = read_prefix(file)
    about = describe_prefix(file, trace)
    if capacities is None:
        whole = max(1, about["blocks"])
        capacities = [max(1, whole >> i) * trace.block_size for i in range(6, -1, -1)]
    points = [
        replay_prefix(trace, capacity, ttl)
        for ttl in ttls
        for capacity in dict.fromkeys(capacities)
    ]
    front = on_front(points)
    return about | {
        "points": [asdict(x) | {"pareto": best} for x, best in zip(points, front, strict=True)]
    }
