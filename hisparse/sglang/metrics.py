"""Cache statistics in SGLang's Prometheus endpoint and in its log."""

from __future__ import annotations

import logging
import time
from typing import Any

from hisparse.engine.metrics import CacheStats
from hisparse.sglang import compat
from hisparse.sglang.session import Session

__all__ = ["MetricsReporter"]

logger = logging.getLogger("hisparse")

#: Seconds between two lines in the log, and between two updates for Prometheus, while something
#: is served; the end of a request updates too, so that an idle server shows its last state.
_LOG_INTERVAL_S = 30.0
_PUBLISH_INTERVAL_S = 0.25

_COUNTERS = {
    "hit_pages": "Pages that decode steps selected and found on the device",
    "miss_pages": "Pages that decode steps selected and brought in from host memory",
    "selected_tokens": "Tokens that decode steps attended, over layers and rows",
    "selections": "Selections that the algorithm made, over layers and rows",
    "prefetched_pages": "Pages that were brought in before a query had selected them",
    "capped_selections": "Selections of varying length that filled device_buffer_size",
    "decode_read_bytes": "Bytes that decode steps read from host memory",
    "prefill_read_bytes": "Bytes that prefill read from host memory",
    "written_bytes": "Bytes written through to host memory",
}
_GAUGES = {
    "hit_ratio": "Hits among the pages that decode steps selected, since the start",
    "host_tokens_used": "Tokens in the host pool",
    "host_tokens_total": "Tokens that the host pool has room for",
    "device_tokens_used": "Tokens that running requests' device pages have room for, over rows",
    "device_tokens_total": "Tokens that all device pages have room for, over rows",
    "max_selected_tokens": "Tokens that a selection and the page being filled hold at most",
    "host_kv_bytes": "Bytes of the KV cache in host memory",
    "host_index_bytes": "Bytes of requests' indexes in host memory",
    "device_kv_bytes": "Bytes of keys and values on the device, staging included",
    "device_representation_bytes": "Bytes on the device by which the algorithm scores pages",
    "device_table_bytes": "Bytes of LRU tables and free lists on the device",
}


class MetricsReporter:
    """Publishes what the coordinator counted, without waiting for the device.

    Args:
        session: this rank's session.
        model_runner: SGLang's, for its allocator and labels.
    """

    def __init__(self, session: Session, model_runner: Any) -> None:
        assert session.coordinator is not None, "the coordinator is built before its metrics"
        self._coordinator = session.coordinator
        self._page_size = session.spec.page_size
        self._runner = model_runner
        self._texts = dict(_COUNTERS)
        for extension in self._coordinator.extensions:
            self._texts |= extension.counters
        self._published: dict[str, int] = dict.fromkeys(self._texts, 0)
        self._last_log = time.monotonic()
        self._last_publish = 0.0
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        if model_runner.server_args.enable_metrics:
            self._register()

    def _register(self) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before its schedulers start and
        # prometheus_client reads it on import.
        from prometheus_client import Counter, Gauge
        from sglang.srt.runtime_context import get_parallel

        _, serving = compat.schedule_and_serving()
        labels = {
            "model_name": serving.served_model_name,
            "tp_rank": get_parallel().tp_rank,
        }
        names = list(labels)
        self._counters = {
            name: Counter(f"hisparse:{name}", text, names).labels(**labels)
            for name, text in self._texts.items()
        }
        self._gauges = {
            name: Gauge(f"hisparse:{name}", text, names, multiprocess_mode="mostrecent").labels(
                **labels
            )
            for name, text in _GAUGES.items()
        }
        self.report(now=True)

    def report(self, *, now: bool = False) -> None:
        """Called after each forward, and with ``now`` when a request has ended."""
        time_s = time.monotonic()
        if self._gauges and (now or time_s - self._last_publish >= _PUBLISH_INTERVAL_S):
            self._last_publish = time_s
            self._publish(self._coordinator.stats())
        if time_s - self._last_log >= _LOG_INTERVAL_S:
            self._last_log = time_s
            self._log(self._coordinator.stats())

    def _publish(self, stats: CacheStats) -> None:
        values = vars(stats) | dict(stats.extensions)
        for name, counter in self._counters.items():
            value = values[name]
            counter.inc(value - self._published[name])
            self._published[name] = value
        for name, value in self._levels(stats).items():
            self._gauges[name].set(value)

    def _levels(self, stats: CacheStats) -> dict[str, float]:
        coordinator = self._coordinator
        manager = coordinator.manager
        allocator, size = self._runner.token_to_kv_pool_allocator, self._page_size
        policy = coordinator.policy
        return {
            "hit_ratio": stats.hit_ratio,
            "host_tokens_used": allocator.size - allocator.available_size(),
            "host_tokens_total": allocator.size,
            "device_tokens_used": manager.residency.capacities.live_pages * size,
            "device_tokens_total": manager.device.free_pages.shape[1] * size,
            "max_selected_tokens": (policy.max_pages + (not coordinator.algorithm.ranks_tail))
            * size,
            "host_kv_bytes": manager.host.num_bytes,
            "host_index_bytes": coordinator.representations.indexes.num_bytes,
            "device_kv_bytes": manager.device.num_bytes + manager.staging_bytes,
            "device_representation_bytes": sum(
                t.nbytes for t in coordinator.representations.tensors.values()
            ),
            "device_table_bytes": manager.device.table_bytes,
        }

    def _log(self, stats: CacheStats) -> None:
        levels = self._levels(stats)
        logger.info(
            "hisparse: hit ratio %.3f (%d hits, %d misses), read %.2f GiB decoding and %.2f GiB in "
            "prefill, wrote %.2f GiB, host tokens %d of %d, device tokens %d of %d",
            stats.hit_ratio,
            stats.hit_pages,
            stats.miss_pages,
            stats.decode_read_bytes / 2**30,
            stats.prefill_read_bytes / 2**30,
            stats.written_bytes / 2**30,
            levels["host_tokens_used"],
            levels["host_tokens_total"],
            levels["device_tokens_used"],
            levels["device_tokens_total"],
        )
