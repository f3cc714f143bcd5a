"""Counters and gauges, under the names that Tair KVCache Manager has, and Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from hisparse.kvcm.election import Node
    from hisparse.kvcm.state import State

#: Counters without a label are there before they count.
_COUNTERS = (
    "cache_manager.write_location_expire_size",
    "cache_reclaimer.block_submit_count",
    "cache_reclaimer.block_del_count",
    "data_storage.create_keys_counter",
    "manager.query_key_counter",
    "manager.hit_key_counter",
)

Metric = tuple[str, int | float, dict[str, str]]


def metrics(node: Node) -> Iterator[Metric]:
    """Name, value and tags of each metric: an int is a counter, a float a gauge."""
    values: dict[tuple[str, str], int | float] = dict.fromkeys(((x, "") for x in _COUNTERS), 0)
    for (name, method), value in (values | node.counters | node.gauges).items():
        yield name, value, {"api_name": method} if method else {}
    yield "manager.is_leader", float(node.lease_left > 0), {}
    if node.state is not None:
        yield from _state_metrics(node.state)


def _state_metrics(state: State) -> Iterator[Metric]:
    keys = sum(x.num_keys for x in state.instances.values())
    yield "meta_indexer.total_key_count", float(keys), {}
    for name, storage in state.storages.items():
        yield "data_storage.is_available", float(storage.available), {"storage": name}
    for name, group in state.groups.items():
        capacity = group.config.quota.capacity
        ratio = group.used.total() / capacity if capacity > 0 else 0.0
        yield "cache_manager_group.usage_ratio", ratio, {"instance_group": name}
    for name, instance in state.instances.items():
        tags = {"instance_group": instance.group.config.name, "instance_id": name}
        yield "cache_manager_instance.key_count", float(instance.num_keys), tags
        yield "cache_manager_instance.byte_size", float(instance.num_bytes), tags


class Exporter:
    """Shows metrics to Prometheus: ``service.query_counter`` as ``kvcm_service_query_counter``."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, value, tags in metrics(self._node):
            if name not in families:
                kind = CounterMetricFamily if isinstance(value, int) else GaugeMetricFamily
                full = f"kvcm_{name.replace('.', '_')}"
                families[name] = kind(full, f"{name} of the manager", labels=tuple(tags))
            families[name].add_metric(list(tags.values()), value)
        yield from families.values()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        text: bytes = generate_latest(self._registry)
        return text
