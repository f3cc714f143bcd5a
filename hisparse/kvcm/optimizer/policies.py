"""Caches of blocks, by what they evict, in the order of Tair KVCache Manager's Optimizer.

A block is a number that stands for itself and for all blocks before it in a prompt. A read touches
the leading blocks that the cache holds, the first block first. A write inserts the blocks that the
cache lacks, in the same order, and touches no other. The order of eviction follows from that: of a
prefix, an LRU evicts the *first* block first, and what is left of the prefix is no hit any more.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np


class Options(NamedTuple):
    """What policies can be told.

    Attributes:
        batch: blocks that one round evicts at most.
        sample_rate: "random_lru" draws ``batch / sample_rate`` blocks, and evicts among these.
        ttl_us: "prefix_lru" drops a block that was not used for so long, in us; None: never.
    """

    batch: int = 100
    sample_rate: float = 0.1
    ttl_us: int | None = None


class Lru:
    """The blocks of one instance; evicts the one whose last touch is the longest ago.

    A larger cache does not hold all that a smaller one holds: a write touches no block that is
    there, where the smaller cache inserts it anew. So each capacity needs a replay.
    """

    def __init__(self, options: Options) -> None:
        self._ttl_us = options.ttl_us
        #: Time of the last use of each block, the least recent first; 0 where no time counts.
        self._held: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def read(self, blocks: Sequence[int], time_us: int) -> int:
        """Look for a prompt, at a time that no earlier call exceeds; return its leading hits."""
        touch, hits = self._held.move_to_end, 0
        try:
            for block in blocks:
                touch(block)
                hits += 1
        except KeyError:
            pass
        return hits

    def write(self, blocks: Sequence[int], time_us: int) -> None:
        """Hold all blocks of a prompt."""
        held = self._held
        for block in blocks:
            if block not in held:
                held[block] = 0

    def evict(self, count: int) -> int:
        """Evict at most so many blocks; return how many. 0: none can be evicted."""
        count, pop = min(count, len(self._held)), self._held.popitem
        for _ in range(count):
            pop(last=False)
        return count

    def settle(self, time_us: int) -> None:
        """Do what has to be done between two requests of the group."""


class PrefixLru(Lru):
    """An LRU of which each request uses all of its blocks, the last one first. Not upstream's.

    So the end of a prefix leaves before its beginning, and a larger cache holds all that a smaller
    one holds.
    """

    def read(self, blocks: Sequence[int], time_us: int) -> int:
        held, hits = self._held, 0
        while hits < len(blocks) and blocks[hits] in held:
            hits += 1
        self._use(blocks[:hits], time_us)
        return hits

    def write(self, blocks: Sequence[int], time_us: int) -> None:
        self._use(blocks, time_us)

    def _use(self, blocks: Sequence[int], time_us: int) -> None:
        held, touch = self._held, self._held.move_to_end
        for block in reversed(blocks):
            held[block] = time_us
            touch(block)

    def settle(self, time_us: int) -> None:
        """Drop the blocks that were not used for too long."""
        held, ttl = self._held, self._ttl_us
        while ttl is not None and held and time_us - next(iter(held.values())) > ttl:
            held.popitem(last=False)


class RandomLru(Lru):
    """Draws blocks at random, and evicts those of them whose last use is the longest ago.

    Blocks of one request have one time; which of these goes first is left to chance. Upstream's
    generator, and its order of equal times, are others.
    """

    def __init__(self, options: Options) -> None:
        self._drawn = int(options.batch / options.sample_rate)
        self._random = np.random.default_rng(0)
        self._blocks: list[int] = []
        #: Of each block: its place in the list, and by place, the time of its last use.
        self._places: dict[int, int] = {}
        self._times = array("q")

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, blocks: Sequence[int], time_us: int) -> int:
        places, times, hits = self._places, self._times, 0
        try:
            for block in blocks:
                times[places[block]] = time_us
                hits += 1
        except KeyError:
            pass
        return hits

    def write(self, blocks: Sequence[int], time_us: int) -> None:
        places, held, times = self._places, self._blocks, self._times
        for block in blocks:
            if block not in places:
                places[block] = len(held)
                held.append(block)
                times.append(time_us)

    def evict(self, count: int) -> int:
        size = len(self._blocks)
        if not size:
            return 0
        # With replacement, as upstream: a round may evict fewer than it was asked for.
        drawn = self._random.integers(0, size, min(self._drawn, size))
        count = min(count, len(drawn))
        oldest = np.argpartition(np.frombuffer(self._times, np.int64)[drawn], count - 1)[:count]
        gone = sorted(set(drawn[oldest].tolist()), reverse=True)
        blocks, places, times = self._blocks, self._places, self._times
        # From the last place down: the last block moves into the place that gets empty.
        for place in gone:
            del places[blocks[place]]
            block, time = blocks.pop(), times.pop()
            if place < len(blocks):
                blocks[place], times[place], places[block] = block, time, place
        return len(gone)


class _Node:
    """A run of blocks of a radix tree, without a branch.

    Attributes:
        blocks: the run, evicted blocks too, until all of a leaf are evicted.
        cached: how many of them the cache holds.
        parent: None: this is the root.
        children: by their first block.
        live: children of which the cache holds a block.
    """

    __slots__ = ("blocks", "cached", "children", "live", "parent")

    def __init__(self, parent: _Node | None, blocks: list[int]) -> None:
        self.blocks, self.cached, self.parent = blocks, 0, parent
        self.children: dict[int, _Node] = {}
        self.live = 0


#: A stamp is a number of a time, and below it a place among what was used at that time.
_TIME_BITS: Final = 40
_MIDDLE: Final = 1 << (_TIME_BITS - 1)


class LeafAwareLru(Lru):
    """An LRU that evicts only from runs of blocks whose continuations are all evicted.

    Upstream keeps a list, sorted by the time of the last use, of the blocks that it may evict. Here
    the list is a dictionary in that order and a heap, for blocks that come back in the middle.
    """

    def __init__(self, options: Options) -> None:
        self._root = _Node(None, [])
        #: Stamps of all blocks that are held.
        self._stamps: dict[int, int] = {}
        #: Nodes of the blocks of the list: those in order, and those of the heap.
        self._listed: OrderedDict[int, _Node] = OrderedDict()
        self._in_heap: dict[int, _Node] = {}
        self._heap: list[tuple[int, int]] = []
        self._times = [-1]
        self._uses = 0
        #: Time of the newest block of the list.
        self._newest = 0
        self._shrunk: set[_Node] = set()
        #: The last read: its blocks, and how far whole nodes of them are held.
        self._walked: tuple[Sequence[int], _Node, int] = (), self._root, 0

    def __len__(self) -> int:
        return len(self._stamps)

    def read(self, blocks: Sequence[int], time_us: int) -> int:
        if self._times[-1] != time_us:
            self._times.append(time_us)
        node, hits, stamps = self._root, 0, self._stamps
        self._walked = blocks, node, hits
        while hits < len(blocks) and (child := node.children.get(blocks[hits])) is not None:
            run = child.blocks
            found = _common(run, blocks, hits)
            if child.cached < len(run):
                found = next((i for i in range(found) if run[i] not in stamps), found)
            self._touch(run if found == len(run) else run[:found])
            hits += found
            if found < len(run):
                break
            node = child
            self._walked = blocks, node, hits
        return hits

    def write(self, blocks: Sequence[int], time_us: int) -> None:
        if self._times[-1] != time_us:
            self._times.append(time_us)
        walked, node, at = self._walked
        if walked is not blocks:
            node, at = self._root, 0
        stamps = self._stamps
        while at < len(blocks):
            child = node.children.get(blocks[at])
            if not node.children and node.parent is not None:
                node.blocks += blocks[at:]
                return self._insert(node, blocks[at:])
            if child is None:
                return self._branch(node, blocks[at:])
            found = _common(child.blocks, blocks, at)
            if child.cached < len(child.blocks):
                self._insert(child, [x for x in child.blocks[:found] if x not in stamps])
            at += found
            if found < len(child.blocks):
                if at < len(blocks):
                    self._branch(self._split(child, found), blocks[at:])
                return None
            node = child
        return None

    def evict(self, count: int) -> int:
        evicted, stamps, shrunk = 0, self._stamps, self._shrunk
        listed, in_heap, pop = self._listed, self._in_heap, self._listed.popitem
        self._walked = (), self._root, 0
        while evicted < count and (listed or in_heap):
            if in_heap and self._heap_is_older():
                _, block = heapq.heappop(self._heap)
                node = in_heap.pop(block)
            else:
                block, node = pop(last=False)
            if node.live:
                continue
            del stamps[block]
            evicted += 1
            node.cached -= 1
            if not node.cached:
                shrunk.add(node)
                parent = node.parent
                assert parent is not None
                parent.live -= 1
                if not parent.live:
                    self._list_again(parent)
        return evicted

    def settle(self, time_us: int) -> None:
        """Forget leaves of which all is evicted."""
        shrunk = self._shrunk
        for each in list(shrunk):
            node = each
            while node in shrunk and not node.cached and not node.children and node.parent:
                del node.parent.children[node.blocks[0]]
                shrunk.discard(node)
                node = node.parent
        shrunk.clear()

    def _stamped(self, count: int) -> range:
        """The next stamps of now."""
        first = (len(self._times) - 1 << _TIME_BITS) + _MIDDLE + self._uses + 1
        self._uses += count
        return range(first, first + count)

    def _touch(self, blocks: Sequence[int]) -> None:
        self._stamps.update(zip(blocks, self._stamped(len(blocks)), strict=True))
        listed, in_heap = self._listed, self._in_heap
        for block in blocks:
            if block in listed:
                listed.move_to_end(block)
                self._newest = self._times[-1]
            elif block in in_heap:
                listed[block] = in_heap.pop(block)
                self._newest = self._times[-1]

    def _insert(self, node: _Node, blocks: Sequence[int]) -> None:
        """Hold blocks of the run of a node that the cache lacked."""
        if not blocks:
            return
        if not node.cached and node.parent is not None:
            node.parent.live += 1
        node.cached += len(blocks)
        self._stamps.update(zip(blocks, self._stamped(len(blocks)), strict=True))
        if not node.children:
            for block in blocks:
                self._listed[block] = node
            self._newest = self._times[-1]

    def _branch(self, node: _Node, blocks: Sequence[int]) -> None:
        child = node.children[blocks[0]] = _Node(node, list(blocks))
        self._insert(child, blocks)

    def _split(self, node: _Node, at: int) -> _Node:
        """Give the first blocks of a run a node of their own, above it, and return that."""
        above = node.parent
        assert above is not None
        upper = above.children[node.blocks[0]] = _Node(above, node.blocks[:at])
        upper.cached = sum(x in self._stamps for x in upper.blocks)
        for block in upper.blocks:
            for listed in (self._listed, self._in_heap):
                if block in listed:
                    listed[block] = upper
        above.live += (upper.cached > 0) - (node.cached > 0)
        node.blocks, node.parent = node.blocks[at:], upper
        node.cached -= upper.cached
        upper.children[node.blocks[0]] = node
        upper.live = int(node.cached > 0)
        return upper

    def _heap_is_older(self) -> bool:
        """Whether the first block of the heap is the oldest one of the list, after tidying it."""
        heap, stamps = self._heap, self._stamps
        while heap[0][1] not in self._in_heap or heap[0][0] != stamps[heap[0][1]]:
            heapq.heappop(heap)
        return not self._listed or heap[0][0] < stamps[next(iter(self._listed))]

    def _oldest(self) -> int | None:
        """Time of the oldest block of the list."""
        if self._in_heap and self._heap_is_older():
            return self._times[self._heap[0][0] >> _TIME_BITS]
        first = next(iter(self._listed), None)
        return None if first is None else self._times[self._stamps[first] >> _TIME_BITS]

    def _list_again(self, node: _Node) -> None:
        """Insert blocks of a run without continuation by their time, as upstream searches for it.

        Upstream searches from the nearer end of the list, which decides on which side of blocks of
        the same time a block goes.
        """
        for block in node.blocks:
            if block not in self._stamps or block in self._listed or block in self._in_heap:
                continue
            rank = self._stamps[block] >> _TIME_BITS
            time, oldest = self._times[rank], self._oldest()
            self._uses += 1
            newer = oldest is None or time >= self._newest
            if oldest is None or newer or (oldest < time and self._newest - time < time - oldest):
                place = self._uses
            else:
                place = -self._uses
            if newer:
                self._newest = time
            self._stamps[block] = (rank << _TIME_BITS) + _MIDDLE + place
            self._in_heap[block] = node
            heapq.heappush(self._heap, (self._stamps[block], block))


def _common(run: Sequence[int], blocks: Sequence[int], at: int) -> int:
    """Number of leading blocks of a run that ``blocks`` has from ``at`` on."""
    count = min(len(run), len(blocks) - at)
    if run[:count] == blocks[at : at + count]:
        return count
    return next(i for i in range(count) if run[i] != blocks[at + i])


POLICIES: Final[Mapping[str, type[Lru]]] = {
    "lru": Lru,
    "random_lru": RandomLru,
    "leaf_aware_lru": LeafAwareLru,
    "prefix_lru": PrefixLru,
}
