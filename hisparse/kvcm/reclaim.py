"""Makes room before quotas are full, by each group's policy."""

import heapq
import math
import time
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from operator import attrgetter
from typing import Final

from hisparse.kvcm.blocks import AT_ONCE, remove_blocks
from hisparse.kvcm.state import SERVING, Block, Group, Instance, State
from hisparse.kvcm.wire import PROTO

_LFU: Final = PROTO.ReclaimPolicy["POLICY_LFU"]
_TTL: Final = PROTO.ReclaimPolicy["POLICY_TTL"]
_LFU_WINDOW: Final = 1 << 16


async def reclaim(state: State) -> None:
    """Remove blocks of groups that are above a level, down to that level and no further.

    The level is a share of each quota, and lower where a write found no room. Blocks that wait for
    deletion count as gone.
    """
    for group in list(state.groups.values()):
        instances = [x for x in state.instances.values() if x.group is group]
        config, needed, group.needed = group.config, group.needed, 0
        share = _share(group)
        types: tuple[int, ...]
        for quota in config.quota.quota_config:
            types = (quota.storage_type,)
            level = _level(quota.capacity, share, needed)
            await _free_bytes(state, group, instances, types, level)
        level = _level(config.quota.capacity, share, needed)
        trigger = config.cache_config.reclaim_strategy.trigger_strategy
        if trigger.used_size > 0:
            level = min(level, trigger.used_size)
        await _free_bytes(state, group, instances, tuple(group.used), level)
        await _expire(state, group, instances)
        most = config.cache_config.meta_indexer_config.max_key_count
        for instance in instances:
            needed, instance.needed = instance.needed, 0
            await _free_keys(state, instance, _level(most, share, needed))


def _share(group: Group) -> float:
    """The share of a quota up to which blocks stay; a configuration without one keeps all."""
    strategy = group.config.cache_config.reclaim_strategy
    return min(1.0, strategy.trigger_strategy.used_percentage or 1.0)


def _level(capacity: int, share: float, needed: int) -> float:
    """What may stay, so that ``needed`` more fit; what can never fit is not asked for."""
    return min(capacity * share, capacity - needed if needed <= capacity else capacity)


async def _free_bytes(
    state: State, group: Group, instances: list[Instance], types: tuple[int, ...], level: float
) -> None:
    left = _step(group)
    while True:
        used = sum(group.used[x] - group.leaving[x] for x in types)
        excess, victims = min(math.ceil(used - level), left), list[Block]()
        if excess <= 0:
            return
        for block in _order(group, instances, types):
            if excess <= 0 or len(victims) == AT_ONCE:
                break
            victims.append(block)
            excess -= block.size
            left -= block.size
        if not await _remove(state, victims):
            return


def _step(group: Group) -> float:
    """Bytes that may go at once, and at least a block; the rest goes at the next looks."""
    strategy = group.config.cache_config.reclaim_strategy
    share = group.config.quota.capacity * strategy.reclaim_step_percentage / 100
    return min(strategy.reclaim_step_size or math.inf, share or math.inf)


async def _free_keys(state: State, instance: Instance, level: float) -> None:
    types = tuple(storage.type for storage in instance.blocks)
    while True:
        staying = instance.num_keys - instance.num_leaving
        excess = math.ceil(staying - level)
        if excess <= 0:
            return
        victims = list(islice(_order(instance.group, [instance], types), min(excess, AT_ONCE)))
        if not await _remove(state, victims):
            return


async def _expire(state: State, group: Group, instances: list[Instance]) -> None:
    """With POLICY_TTL, remove blocks that were not used for ``trigger_period_seconds``."""
    strategy = group.config.cache_config.reclaim_strategy
    seconds = strategy.trigger_period_seconds
    if strategy.reclaim_policy != _TTL or seconds <= 0:
        return
    before = time.time() - seconds
    while True:
        oldest = takewhile(lambda x: x.time < before, _oldest(instances, tuple(group.used)))
        if not await _remove(state, list(islice(oldest, AT_ONCE))):
            return


async def _remove(state: State, victims: list[Block]) -> bool:
    """Remove blocks of one group; whether there were any."""
    if not victims:
        return False
    delay = victims[0].instance.group.delay
    removed = await remove_blocks(state, victims, delay)
    state.counters["cache_reclaimer.block_submit_count", ""] += len(removed)
    return bool(removed)


def _order(group: Group, instances: list[Instance], types: tuple[int, ...]) -> Iterator[Block]:
    """Blocks that serve, in the order in which they go.

    With POLICY_LFU the least read go first, of those of the longest unused: blocks that were read
    often once do not stay for ever.
    """
    oldest = _oldest(instances, types)
    if group.config.cache_config.reclaim_strategy.reclaim_policy != _LFU:
        return oldest
    return iter(sorted(islice(oldest, _LFU_WINDOW), key=attrgetter("uses")))


def _oldest(instances: Iterable[Instance], types: tuple[int, ...]) -> Iterator[Block]:
    """Blocks that serve, those of the longest unused first."""
    # Those that wait for deletion are not in the order of their times.
    shelves = [
        (block for block in blocks.values() if block.status == SERVING)
        for instance in instances
        for storage, blocks in instance.blocks.items()
        if storage.type in types
    ]
    return heapq.merge(*shelves, key=attrgetter("time"))
