"""Replays a trace through caches of several capacities, and says which capacity it needs.

The model of the time to first token, for a request that waits for no other one: the prompt tokens
that are computed, divided by the prefill rate, and those that are loaded, divided by the load rate.
Blocks that the engine has itself (``Event.mask``) take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, TypedDict, cast
from urllib.parse import quote

from hisparse.errors import ConfigError, quoted, unknown_name
from hisparse.kvcm.optimizer.policies import POLICIES, Lru, Options
from hisparse.kvcm.optimizer.traces import Event, Trace
from hisparse.options import check_fields, read_object

#: Share of what the best cache saves that a recommended one saves.
_ENOUGH: Final = 0.95
#: Columns of Tair's files.
_COLUMNS: Final = (
    "TimestampUs,CachedBlocksCurrentInstance,CachedBlocksPerInstance,CachedBlocksAllInstance,"
    "InternalReadBlocks,ExternalReadBlocks,TotalReadBlocks,InternalHitBlocks,InternalHitRate,"
    "ExternalHitBlocks,ExternalHitRate,HitRate,AccInternalHitRate,AccExternalHitRate,AccHitRate\n"
)


class Member(TypedDict):
    """An instance of a group, with fields of Tair's configuration; parameters: "sample_rate"."""

    instance_id: str
    eviction_policy_type: str
    eviction_policy_params: Mapping[str, float]


class Group(TypedDict):
    """Instances that share a capacity, in blocks, of which they use a share."""

    group_name: str
    quota_capacity: int
    used_percentage: float
    instances: list[Member]


class _Config(TypedDict):
    eviction_params: dict[str, Any]
    instance_groups: list[Group]


class Setup(NamedTuple):
    """Groups, and how they evict once they exceed their capacity.

    Attributes:
        groups: the groups.
        mode: 1: from all instances of a group in turn, ``batch`` blocks each; 2: from the instance
            that wrote, in rounds of ``batch``, so more than needed; 3: from it, just as needed.
        batch: blocks.
    """

    groups: Sequence[Group]
    mode: int = 3
    batch: int = 100


def make_setup(trace: Trace) -> Setup:
    """A group of all instances of a trace, with a capacity for all of its blocks."""
    policy: dict[str, Any] = {"eviction_policy_type": "lru", "eviction_policy_params": {}}
    members = [cast(Member, {"instance_id": name} | policy) for name in trace.instances]
    size = trace.num_blocks
    group = Group(group_name="all", quota_capacity=size, used_percentage=1.0, instances=members)
    return Setup([group])


def read_setup(file: Path) -> Setup:
    """Read groups and eviction from a configuration of Tair's Optimizer; the rest is ignored.

    Raises:
        ConfigError: the file is no such configuration.
    """
    where = f"--config {str(file)!r}"
    found = read_object(file, "--config", '{"eviction_params": {}, "instance_groups": []}')
    check_fields(where, found, _Config)
    groups: list[Group] = found["instance_groups"]
    members = [member for group in groups for member in group["instances"]]
    names = [member["instance_id"] for member in members]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{where}: got instances {quoted(names)}, expected each once")
    for member in members:
        if (policy := member["eviction_policy_type"]) not in POLICIES:
            raise ConfigError(f"{where}: {unknown_name('policy', policy, POLICIES)}")
        rate = member["eviction_policy_params"].get("sample_rate", 0)
        if type(rate) not in (int, float) or not (rate <= 0 or 1e-6 <= rate <= 1):
            raise ConfigError(f"{where}: sample_rate: got {rate!r}, expected 0.000001 to 1")
    for group in groups:
        if group["quota_capacity"] < 0 or not 0 < group["used_percentage"] <= 1:
            got = f"{group['quota_capacity']} and {group['used_percentage']}"
            raise ConfigError(
                f"{where}: quota_capacity and used_percentage: got {got}, expected blocks from 0 "
                "on, and a share above 0 to 1"
            )
    eviction = found["eviction_params"]
    mode, batch = (eviction.get(f"eviction_{x}") for x in ("mode", "batch_size_per_instance"))
    batch = 100 if batch is None else batch
    if mode not in (1, 2, 3) or type(batch) is not int or batch < 1:
        raise ConfigError(
            f"{where}: eviction_params: got {quoted(eviction)}, expected an eviction_mode of 1, 2 "
            "or 3, and an eviction_batch_size_per_instance of at least 1"
        )
    return Setup(groups, mode, batch)


class Point(NamedTuple):
    """What a replay varies.

    Attributes:
        policy: of all instances; None: as the setup has them.
        capacity: blocks of each group; None: as the setup has them.
        ttl_s: seconds that "prefix_lru" keeps an unused block; None: no limit.
    """

    policy: str | None
    capacity: int | None
    ttl_s: float | None = None


#: A read, its leading hits, and the blocks of each instance after it; None: it is in no group.
Read = tuple[Event, int, Sequence[Lru | None]]


def replay(trace: Trace, setup: Setup, point: Point) -> Iterator[Read]:
    """Replay the events of the instances that are in a group; yield the reads.

    Hits are counted among the blocks that are asked for.
    """
    ttl_us = None if point.ttl_s is None else int(1e6 * point.ttl_s)
    caches: list[Lru | None] = [None] * len(trace.instances)
    shared: dict[int, tuple[list[Lru], int]] = {}
    for group in setup.groups:
        those: list[Lru] = []
        for member in group["instances"]:
            number = trace.instances.get(member["instance_id"])
            if number is not None:
                rate = member["eviction_policy_params"].get("sample_rate", 0)
                options = Options(setup.batch, rate if rate > 0 else 0.1, ttl_us)
                cache = POLICIES[point.policy or member["eviction_policy_type"]](options)
                caches[number] = cache
                those.append(cache)
                shared[number] = those, _limit(group, point)
    for event in trace.events:
        own = caches[event.instance]
        if own is None:
            continue
        those, limit = shared[event.instance]
        for each in those:
            each.settle(event.time_us)
        hits = 0
        if event.asked is not None:
            hits = min(own.read(event.blocks, event.time_us), event.asked)
        if event.writes:
            own.write(event.blocks, event.time_us)
            excess = sum(map(len, those)) - limit
            while excess > 0:
                count = min(setup.batch, excess) if setup.mode == 3 else setup.batch
                evicted = sum(each.evict(count) for each in (those if setup.mode == 1 else [own]))
                if not evicted:
                    break
                excess -= evicted
        if event.asked is not None:
            yield event, hits, caches


def _limit(group: Group, point: Point) -> int:
    quota = int(group["quota_capacity"] * group["used_percentage"])
    return quota if point.capacity is None else point.capacity


@dataclass
class Counts:
    """Blocks and tokens of reads.

    Attributes:
        reads: how many.
        internal, external: blocks that were asked for: those that the engine has, and the others.
        internal_hits, external_hits: those of them that the cache held, from the first one on.
        computed, loaded: prompt tokens.
        peak: blocks that the instance held at most after a read.
    """

    reads: int = 0
    internal: int = 0
    external: int = 0
    internal_hits: int = 0
    external_hits: int = 0
    computed: int = 0
    loaded: int = 0
    peak: int = 0

    def add(self, read: Read, block_size: int) -> None:
        """Count a read; a block has so many tokens."""
        event, hits, caches = read
        asked, mask = event.asked or 0, event.mask
        internal, hit = (
            min(mask, n) if isinstance(mask, int) else sum(mask[:n]) for n in (asked, hits)
        )
        tokens = asked * block_size if event.tokens is None else event.tokens
        own = min(tokens, internal * block_size)
        loaded = min(tokens - own, (hits - hit) * block_size)
        self.reads += 1
        self.internal += internal
        self.external += asked - internal
        self.internal_hits += hit
        self.external_hits += hits - hit
        self.computed += tokens - own - loaded
        self.loaded += loaded
        self.peak = max(self.peak, len(caches[event.instance] or ()))

    def rates(self) -> tuple[float, float]:
        """Internal and external hits, of all blocks that were asked for."""
        total = max(1, self.internal + self.external)
        return self.internal_hits / total, self.external_hits / total


def _count(
    trace: Trace, setup: Setup, point: Point, block_size: int, folder: Path | None
) -> list[Counts]:
    """Replay once, with Tair's files in a folder, if there is one; the counts of each instance."""
    counts, files = [Counts() for _ in trace.instances], dict[int, TextIO]()
    with ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name, number in trace.instances.items():
                path = folder / f"{quote(name, safe='')}_hit_rates.csv"
                files[number] = stack.enter_context(open(path, "w", encoding="utf-8"))
                files[number].write(_COLUMNS)
        for read in replay(trace, setup, point):
            number = read[0].instance
            counts[number].add(read, block_size)
            if files:
                (now := Counts()).add(read, block_size)
                files[number].write(_row(read, now, counts[number]))
    return counts


def _row(read: Read, now: Counts, until_now: Counts) -> str:
    event, _, caches = read
    held = [len(cache or ()) for cache in caches]
    (internal, external), (all_internal, all_external) = now.rates(), until_now.rates()
    row = (
        event.time_us, held[event.instance], ";".join(map(str, held)), sum(held),
        now.internal, now.external, now.internal + now.external,
        now.internal_hits, f"{internal:g}", now.external_hits, f"{external:g}",
        f"{internal + external:g}", f"{all_internal:g}", f"{all_external:g}",
        f"{all_internal + all_external:g}",
    )  # fmt: skip
    return ", ".join(map(str, row)) + "\n"


def sweep(
    trace: Trace,
    setup: Setup,
    points: Sequence[Point],
    block_size: int,
    *,
    prefill: float | None = None,
    load: float | None = None,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Replay a trace at each point.

    Args:
        setup: groups and eviction.
        points: what the replays vary.
        block_size: tokens.
        prefill: tokens a second; None: not known, so tokens are the cost instead of seconds.
        load: tokens a second; None: loading takes no time.
        out: folder of Tair's files; those of several points get a folder each in it.

    Returns:
        For each group: a row for each point, and the recommendation.
    """
    measured = []
    for point in points:
        words = [str(x) for x in point if x is not None]
        folder = out / "-".join(words) if out and len(points) > 1 else out
        measured.append(_count(trace, setup, point, block_size, folder))
    weights = 1 / (prefill or 1), 1 / load if load else 0.0
    unit = "s to the first token" if prefill else "tokens computed"
    found = []
    for group in setup.groups:
        rows = [
            _row_of(trace, group, *each, weights) for each in zip(points, measured, strict=True)
        ]
        # The Pareto front: each cache that costs less than all that are smaller.
        least = float("inf")
        for row in sorted(rows, key=lambda x: (x["capacity"], x["cost"])):
            row["front"] = row["cost"] < least
            least = min(least, row["cost"])
        none = rows[0]["cost_without_a_cache"]
        about = {"group": group["group_name"], "unit": unit, "points": rows}
        found.append(about | {"recommendation": _recommend(rows, none, unit)})
    return found


def _row_of(
    trace: Trace, group: Group, point: Point, counts: Sequence[Counts], weights: tuple[float, float]
) -> dict[str, Any]:
    names = [x["instance_id"] for x in group["instances"] if x["instance_id"] in trace.instances]
    mine = {name: counts[trace.instances[name]] for name in names}
    total = Counts(*map(sum, zip(*map(astuple, mine.values()), strict=True)))
    (internal, external), reads = total.rates(), max(1, total.reads)
    configured = "+".join(sorted({x["eviction_policy_type"] for x in group["instances"]}))
    return {
        "policy": point.policy or configured,
        "capacity": _limit(group, point),
        "ttl_s": point.ttl_s,
        "hit_rate": internal + external,
        "internal_hit_rate": internal,
        "external_hit_rate": external,
        "token_hit_rate": total.loaded / max(1, total.loaded + total.computed),
        "peak_blocks": total.peak,
        "cost": (total.computed * weights[0] + total.loaded * weights[1]) / reads,
        "cost_without_a_cache": (total.computed + total.loaded) * weights[0] / reads,
        "instances": {name: sum(x.rates()) for name, x in mine.items()},
    }


def _recommend(rows: Sequence[dict[str, Any]], none: float, unit: str) -> str:
    """One sentence: the smallest cache that saves nearly as much as the best one."""
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["capacity"])
    saved = [none - row["cost"] for row in front]
    if saved[-1] <= 0:
        return "None of these caches finds a block that the engine does not have itself."
    i = next(i for i, each in enumerate(saved) if each >= _ENOUGH * saved[-1])
    row, most = front[i], front[-1]
    than = f", {saved[i] / saved[-1]:.0%} of what {most['capacity']:,} save" if row != most else ""
    return (
        f"{row['capacity']:,} blocks with {row['policy']} save {saved[i] / none:.0%} of the mean "
        f"cost of a request{than}: {row['cost']:,.4g} {unit} instead of {none:,.4g}."
    )
