"""Cache statistics: what they are called, and the lines about them in SGLang's log."""

import logging
import time
from typing import Any

from hisparse.cache.counters import COUNTERS, CacheStats
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.sglang.session import ServerSession

logger = logging.getLogger("hisparse")

#: Seconds between two log lines and between two updates of the metrics while requests run. The end
#: of a request triggers an update as well, so that an idle server shows its last state.
_LOG_INTERVAL_S = 30.0
_PUBLISH_INTERVAL_S = 0.25

#: Counters of faults of the algorithm; each rise is logged.
_FAULTS = ("invalid_scores", "malformed_selections")
GAUGES = {
    "hit_ratio": "Share of the selected pages that were on the device, since the start",
    "host_tokens_used": "Tokens in the host pool",
    "host_tokens_total": "Capacity of the host pool, in tokens",
    "device_tokens_used": "Capacity of running requests' device pages, in tokens, over rows",
    "device_tokens_total": "Capacity of all device pages, in tokens, over rows",
    "max_selected_tokens": "Maximum number of tokens in a selection and its tail page",
    "host_kv_bytes": "Host memory of the KV cache, in bytes; this rank's part of a shared one",
    "host_representation_bytes": "Host memory of the algorithm's representations, in bytes",
    "device_kv_bytes": "Device memory of keys and values, staging included, in bytes",
    "device_representation_bytes": "Device memory of the algorithm's representations, in bytes",
    "device_table_bytes": "Device memory of LRU tables and free lists, in bytes",
}


def gauge_values(
    stats: CacheStats, coordinator: SparseCoordinator, allocator: Any
) -> dict[str, float]:
    """The gauges' values.

    Args:
        stats: the coordinator's, now.
        coordinator: the engine.
        allocator: SGLang's, of host slots.
    """
    manager, policy = coordinator.manager, coordinator.policy
    size = manager.host.kv.page_size
    # A full tail page may be one of the selected pages.
    tail_tokens = size - (policy.tail_below is not None)
    return {
        "hit_ratio": stats.hit_ratio,
        "host_tokens_used": allocator.size - allocator.available_size(),
        "host_tokens_total": allocator.size,
        "device_tokens_used": manager.residency.capacities.live_pages * size,
        "device_tokens_total": manager.device.free_pages.shape[1] * size,
        "max_selected_tokens": policy.max_pages * size + tail_tokens,
        "host_kv_bytes": manager.host.rank_bytes,
        "host_representation_bytes": coordinator.representations.num_bytes("host"),
        "device_kv_bytes": manager.device.num_bytes + manager.staging.num_bytes,
        "device_representation_bytes": coordinator.representations.num_bytes("device"),
        "device_table_bytes": manager.device.table_bytes,
    }


class MetricsReporter:
    """Publishes the coordinator's statistics from time to time, and logs them.

    Args:
        session: this rank's session, with its coordinator.
        model_runner: SGLang's ``ModelRunner``; provides the allocator.
    """

    def __init__(self, session: ServerSession, model_runner: Any) -> None:
        self._session, self._coordinator = session, session.coordinator
        self._runner = model_runner
        self._last_log = time.monotonic()
        self._last_publish = 0.0
        self._last_faults = dict.fromkeys(_FAULTS, 0)
        if logger.isEnabledFor(logging.DEBUG):
            self._coordinator.choices.observer = self._log_choice

    def report(self, *, now: bool = False) -> None:
        """Publish and log the statistics if enough time has passed.

        Args:
            now: publish at once; set when a request ends.
        """
        time_s = time.monotonic()
        if now or time_s - self._last_publish >= _PUBLISH_INTERVAL_S:
            self._last_publish = time_s
            stats = self._coordinator.stats()
            self._warn(stats)
            for publish in self._session.publishers:
                publish(stats)
        if time_s - self._last_log >= _LOG_INTERVAL_S:
            self._last_log = time_s
            self._log(self._coordinator.stats())

    def _log_choice(self, slot: int, choice: str, tokens: int) -> None:
        """Log what was decided for a request of this forward; a busy server has many requests."""
        session, manager = self._session, self._coordinator.manager
        assert session.slots_cpu is not None, "SGLang creates the forward batch first"
        request = session.requests[session.slots_cpu.tolist().index(slot)]
        held = int(manager.residency.capacities.held[slot]) * manager.host.kv.page_size
        text = "hisparse: request %s: %s, %d tokens, device pages of %d tokens in each row"
        logger.debug(text, request.rid, choice, tokens, held)

    def _warn(self, stats: CacheStats) -> None:
        """Log what the algorithm did wrong since the last call."""
        for name, before in self._last_faults.items():
            total = getattr(stats, name)
            if total > before:
                self._last_faults[name] = total
                cls = type(self._coordinator.algorithm)
                logger.warning(
                    "hisparse: algorithm %s (%s): got %d more %s (%s), expected none; "
                    "find them with `hisparse check %s:%s`",
                    cls.__name__,
                    cls.__module__,
                    total - before,
                    name,
                    COUNTERS[name],
                    cls.__module__,
                    cls.__name__,
                )

    def _log(self, stats: CacheStats) -> None:
        allocator = self._runner.token_to_kv_pool_allocator
        values = gauge_values(stats, self._coordinator, allocator)
        logger.info(
            "hisparse: hit ratio %.3f (%d hits, %d misses), read %.2f GiB decoding and %.2f GiB in "
            "prefill, wrote %.2f GiB, host tokens %d of %d, device tokens %d of %d",
            stats.hit_ratio,
            stats.hit_pages,
            stats.miss_pages,
            stats.decode_read_bytes / 2**30,
            stats.prefill_read_bytes / 2**30,
            stats.written_bytes / 2**30,
            values["host_tokens_used"],
            values["host_tokens_total"],
            values["device_tokens_used"],
            values["device_tokens_total"],
        )
