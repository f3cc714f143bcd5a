"""Caches of the Optimizer: equal to plain lists, and to what Tair's own code counts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.kvcm.optimizer.policies import LeafAwareLru, Options, RandomLru
from hisparse.kvcm.optimizer.replay import Point, Setup, make_setup, replay
from hisparse.kvcm.optimizer.traces import Trace

#: What a request does, its instance, the time since the last one, its keys, and those it asks for.
Step = tuple[str, int, int, Sequence[int], int]

steps = st.lists(
    st.tuples(
        st.sampled_from("rwt"),
        st.integers(0, 1),
        st.integers(0, 2),
        st.lists(st.integers(0, 1), max_size=7),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=40,
)


def trace_of(given: Sequence[Step]) -> Trace:
    trace, time = Trace(file=Path("a"), format="mooncake"), 0
    for kind, instance, later, keys, asked in given:
        time += later
        count = None if kind == "w" else len(keys) if kind == "r" else min(asked, len(keys))
        trace.add("", str(instance), time, keys, count, writes=kind != "r")
    return trace


def evict(held: Sequence[list[int]], own: list[int], capacity: int, mode: int, batch: int) -> None:
    """As the modes say, from lists with the oldest block first."""
    while (excess := sum(map(len, held)) - capacity) > 0:
        gone = [each[:batch] for each in held] if mode == 1 else [own[: min(batch, excess)]]
        if mode == 2:
            gone = [own[: -(-excess // batch) * batch]]
        for cache, blocks in zip(held if mode == 1 else [own], gone, strict=True):
            del cache[: len(blocks)]
        if not any(gone):
            return


def plain_lru(
    trace: Trace, capacity: int, mode: int, batch: int
) -> Iterator[tuple[int, list[int]]]:
    """Hits of each read, and the blocks that each instance holds after it."""
    held: list[list[int]] = [[] for _ in trace.instances]
    for event in trace.events:
        own, hits = held[event.instance], 0
        if event.asked is not None:
            while hits < len(event.blocks) and event.blocks[hits] in own:
                own.append(own.pop(own.index(event.blocks[hits])))
                hits += 1
        if event.writes:
            own += [block for block in event.blocks if block not in own]
            evict(held, own, capacity, mode, batch)
        if event.asked is not None:
            yield min(hits, event.asked), [len(each) for each in held]


def replayed(
    trace: Trace, policy: str, capacity: int, mode: int, batch: int, ttl_s: float | None = None
) -> list[tuple[int, list[int]]]:
    setup = Setup(make_setup(trace).groups, mode, batch)
    found = replay(trace, setup, Point(policy, capacity, ttl_s))
    return [(hits, [len(cache or ()) for cache in caches]) for _, hits, caches in found]


@given(steps, st.integers(0, 12), st.sampled_from([1, 2, 3]), st.integers(1, 5))
def test_lru_equals_a_list(given: list[Step], capacity: int, mode: int, batch: int) -> None:
    trace = trace_of(given)
    expected = list(plain_lru(trace, capacity, mode, batch))
    assert replayed(trace, "lru", capacity, mode, batch) == expected


class Run:
    """A node of the plain tree: blocks, evicted ones too, and what continues them."""

    def __init__(self, above: Run | None, blocks: Sequence[int]) -> None:
        self.above, self.blocks, self.below = above, list(blocks), list[Run]()


class PlainTree:
    """What Tair's leaf-aware LRU does, with a list, newest first, that is searched."""

    def __init__(self) -> None:
        self.root = Run(None, [])
        self.times: dict[int, int] = {}
        self.listed: list[int] = []

    def runs(self, run: Run) -> Iterator[Run]:
        yield run
        for each in run.below:
            yield from self.runs(each)

    def owner(self, block: int) -> Run:
        return next(run for run in self.runs(self.root) if block in run.blocks)

    def is_data_leaf(self, run: Run) -> bool:
        return not any(block in self.times for each in run.below for block in each.blocks)

    def read(self, blocks: Sequence[int], time: int) -> int:
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.times:
            self.times[blocks[hits]] = time
            if blocks[hits] in self.listed:
                self.listed.remove(blocks[hits])
                self.listed.insert(0, blocks[hits])
            hits += 1
        return hits

    def hold(self, run: Run, blocks: Sequence[int], time: int) -> None:
        for block in blocks:
            self.times[block] = time
            if not run.below:
                self.listed.insert(0, block)

    def write(self, blocks: Sequence[int], time: int) -> None:
        run, rest = self.root, list(blocks)
        while rest:
            below = next((each for each in run.below if each.blocks[0] == rest[0]), None)
            if not run.below and run.above:
                run.blocks += rest
                return self.hold(run, rest, time)
            if below is None:
                run.below.append(Run(run, rest))
                return self.hold(run.below[-1], rest, time)
            count = sum(block in rest for block in below.blocks)
            self.hold(below, [x for x in below.blocks[:count] if x not in self.times], time)
            rest = rest[count:]
            if count == len(below.blocks):
                run = below
            elif not rest:
                return None
            else:
                upper = Run(run, below.blocks[:count])
                run.below[run.below.index(below)] = upper
                below.above, below.blocks = upper, below.blocks[count:]
                upper.below = [below, Run(upper, rest)]
                return self.hold(upper.below[1], rest, time)
        return None

    def evict(self, count: int) -> int:
        gone: list[int] = []
        while self.listed and len(gone) < count:
            block = self.listed.pop()
            run = self.owner(block)
            if not self.is_data_leaf(run):
                continue
            gone.append(block)
            del self.times[block]
            if run.above is not None and self.is_data_leaf(run.above):
                for each in run.above.blocks:
                    if each in self.times and each not in self.listed:
                        self.list_again(each)
        self.gone = [*getattr(self, "gone", []), *gone]
        return len(gone)

    def list_again(self, block: int) -> None:
        times, time = [self.times[each] for each in self.listed], self.times[block]
        # From the front: before equal times. From the back: behind them.
        front = next((i for i, each in enumerate(times) if each <= time), len(times))
        back = next((len(times) - i for i, x in enumerate(times[::-1]) if x >= time), 0)
        if times and time < times[0] and (time <= times[-1] or times[0] - time >= time - times[-1]):
            front = back
        self.listed.insert(front, block)

    def settle(self) -> None:
        runs = [self.owner(block) for block in getattr(self, "gone", [])]
        for _ in runs:
            for run in runs:
                empty = not any(block in self.times for block in run.blocks)
                if empty and not run.below and run.above and run in run.above.below:
                    run.above.below.remove(run)
        self.gone = []


@given(steps, st.integers(0, 12), st.integers(1, 5))
def test_leaf_aware_lru_equals_a_searched_list(
    given: list[Step], capacity: int, batch: int
) -> None:
    trace, plain = trace_of(given), PlainTree()
    cache = LeafAwareLru(Options(batch))
    for event in trace.events:
        if event.asked is not None:
            blocks, time = event.blocks, event.time_us
            assert cache.read(blocks, time) == plain.read(blocks, time)
        if event.writes:
            cache.write(event.blocks, event.time_us)
            plain.write(event.blocks, event.time_us)
            while len(cache) > capacity:
                found = cache.evict(batch)
                assert found == plain.evict(batch)
                if not found:
                    break
        cache.settle(event.time_us)
        plain.settle()
        assert len(cache) == len(plain.times)


#: Hits of 400 random requests with capacities of 6, 30 and 90 blocks, and the blocks that the two
#: instances hold after each read, times the number of the read: as Tair's own code counts them
#: (commit f6aa2b2, its index, policies and managers, compiled as they are).
TAIR = {
    ("lru", 1): [(39, 67499, 59076), (458, 355652, 537949), (745, 1075781, 1856221)],
    ("lru", 2): [(55, 43010, 121586), (358, 100550, 870395), (751, 1139845, 1860778)],
    ("lru", 3): [(63, 101790, 101790), (476, 305337, 712521), (751, 1318401, 1727596)],
    ("leaf_aware_lru", 1): [(77, 67615, 55352), (510, 426818, 479550), (759, 1143086, 1790289)],
    ("leaf_aware_lru", 2): [(128, 88130, 76032), (515, 422381, 548670), (753, 1515474, 1474302)],
    ("leaf_aware_lru", 3): [(168, 95121, 108692), (541, 305337, 712521), (766, 1318401, 1727596)],
}  # fmt: skip


@pytest.fixture(scope="module")
def requests() -> Trace:
    draw = random.Random(3).random
    trace, prompts, time = Trace(file=Path("a"), format="mooncake"), [[]], 0
    for name in "01":
        trace.instances[name] = int(name)
    for _ in range(400):
        time += int(3 * draw())
        base = prompts[-1 - int(min(len(prompts), 12) * draw())]
        keys = base[: int((len(base) + 1) * draw())]
        keys = keys + [int(3 * draw()) for _ in range(int(6 * draw()))]
        prompts.append(keys)
        kind, instance = "rwt"[int(3 * draw())], str(int(2 * draw()))
        asked = None if kind == "w" else len(keys)
        trace.add("", instance, time, keys, asked, writes=kind != "r")
    return trace


@pytest.mark.parametrize(("policy", "mode"), TAIR)
def test_hits_and_sizes_are_those_of_tair(policy: str, mode: int, requests: Trace) -> None:
    for capacity, expected in zip((6, 30, 90), TAIR[policy, mode], strict=True):
        found = replayed(requests, policy, capacity, mode, 4)
        sizes = [sum(i * held[k] for i, (_, held) in enumerate(found)) for k in (0, 1)]
        assert (sum(hits for hits, _ in found), *sizes) == expected


def test_a_larger_lru_may_hit_less() -> None:
    """So no single pass gives the hits of all capacities."""
    trace = trace_of([("t", 0, 1, keys, 9) for keys in ([0, 0], [1, 0], [0, 0], [0, 0])])
    hits = [sum(x for x, _ in replayed(trace, "lru", size, 3, 1)) for size in (1, 2, 3, 4)]
    assert hits == [0, 2, 1, 4]


@given(steps, st.integers(0, 12))
def test_prefix_lru_equals_a_list(given: list[Step], capacity: int) -> None:
    """Each request uses all of its blocks, the last one first."""
    trace = trace_of([(kind, 0, *rest) for kind, _, *rest in given])
    held: list[int] = []
    expected = []
    for event in trace.events:
        blocks, hits = event.blocks, 0
        while hits < len(blocks) and blocks[hits] in held:
            hits += 1
        for block in reversed(blocks if event.writes else blocks[:hits]):
            held = [*(x for x in held if x != block), block]
        held = held[-capacity:] if capacity else []
        if event.asked is not None:
            expected.append((min(hits, event.asked), [len(held)]))
    # A read of an empty cache leaves it empty, whatever its order.
    assert replayed(trace, "prefix_lru", capacity, 3, 1) == expected


def test_prefix_lru_drops_blocks_after_their_last_use() -> None:
    trace = trace_of([("t", 0, 1_000_000, [key], 1) for key in (1, 1, 2, 1)])
    for ttl_s, hits in ((2.0, 2), (1.0, 1), (0.5, 0), (None, 2)):
        assert sum(x for x, _ in replayed(trace, "prefix_lru", 9, 3, 1, ttl_s)) == hits


def test_random_lru_evicts_the_oldest_if_it_draws_them_all() -> None:
    cache = RandomLru(Options(1, 1e-4))
    for block in range(50):
        cache.write([block], block)
    assert cache.read([7, 8, 99, 9], 60) == 2
    assert [cache.evict(1) for _ in range(45)] == [1] * 45
    assert cache.read([7], 61) == cache.read([8], 61) == 1
    assert cache.read([0], 61) == cache.read([44], 61) == 0


@given(steps, st.integers(0, 12), st.floats(0.01, 1))
def test_random_lru_keeps_within_the_capacity(
    given: list[Step], capacity: int, rate: float
) -> None:
    trace = trace_of([(kind, 0, *rest) for kind, _, *rest in given])
    cache, held = RandomLru(Options(3, rate)), set[int]()
    for event in trace.events:
        found = cache.read(event.blocks, event.time_us)
        assert found == next((i for i, x in enumerate(event.blocks) if x not in held), found)
        cache.write(event.blocks, event.time_us)
        while len(cache) > capacity:
            assert 0 < cache.evict(min(3, len(cache) - capacity)) <= 3
        assert len(cache) <= capacity
        held = {block for block in held | {*event.blocks} if block in cache._places}
        assert len(held) == len(cache)
