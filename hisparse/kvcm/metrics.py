"""Counters and gauges, under the names that Tair KVCache Manager has."""

from __future__ import annotations

from collections.abc import Iterator

from hisparse.kvcm.state import State

#: Counters without a label are there before they count.
_COUNTERS = (
    "cache_manager.write_location_expire_size",
    "cache_reclaimer.block_submit_count",
    "cache_reclaimer.block_del_count",
    "data_storage.create_keys_counter",
)


def metrics(state: State) -> Iterator[tuple[str, int | float, dict[str, str]]]:
    """Name, value and tags of each metric: an int is a counter, a float a gauge."""
    values: dict[tuple[str, str], int | float] = dict.fromkeys(((x, "") for x in _COUNTERS), 0)
    for (name, method), value in (values | state.counters | state.gauges).items():
        yield name, value, {"api_name": method} if method else {}
    keys = sum(x.num_keys for x in state.instances.values())
    yield "meta_indexer.total_key_count", float(keys), {}
    for name, group in state.groups.items():
        capacity = group.config.quota.capacity
        ratio = group.used.total() / capacity if capacity > 0 else 0.0
        yield "cache_manager_group.usage_ratio", ratio, {"instance_group": name}
    for name, instance in state.instances.items():
        tags = {"instance_group": instance.group.config.name, "instance_id": name}
        yield "cache_manager_instance.key_count", float(instance.num_keys), tags
        yield "cache_manager_instance.byte_size", float(instance.num_bytes), tags
