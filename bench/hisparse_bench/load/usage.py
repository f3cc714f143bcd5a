"""What a server says of its memory and of what its cache moved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.error import HTTPError

from hisparse_bench.server import ServerClient

_DEVICE = ("device_kv_bytes", "device_representation_bytes", "device_table_bytes")
_HOST = ("host_kv_bytes", "host_index_bytes", "host_representation_bytes")
_MOVED = ("hit_pages", "miss_pages", "decode_read_bytes", "prefill_read_bytes", "written_bytes")
#: Metrics are published when a request ends, by another process than the one that answers.
_SETTLE_S = 0.5


def _metrics(server: ServerClient) -> dict[str, float]:
    """A server's metrics; none if it runs without ``--enable-metrics``."""
    try:
        return server.metrics()
    except HTTPError:
        return {}


@dataclass(frozen=True)
class Usage:
    """A server's state at one time.

    Attributes:
        metrics: Prometheus metrics, summed over label sets.
        kv_tokens: capacity of its KV cache.
    """

    metrics: Mapping[str, float]
    kv_tokens: int

    @classmethod
    def read(cls, server: ServerClient) -> Usage:
        """Ask an idle server."""
        time.sleep(_SETTLE_S)
        memory = server.info()["internal_states"][0]["memory_usage"]
        return cls(_metrics(server), int(memory["token_capacity"]))

    @property
    def is_hisparse(self) -> bool:
        """Whether hisparse serves."""
        return "hisparse:device_kv_bytes" in self.metrics

    def memory(self, kv_token_bytes: int) -> dict[str, int]:
        """Bytes of the KV cache; those of a dense one are tokens times ``kv_token_bytes``."""
        if not self.is_hisparse:
            device, host = self.kv_tokens * kv_token_bytes, 0
        else:
            device, host = (
                int(sum(self.metrics[f"hisparse:{name}"] for name in names))
                for names in (_DEVICE, _HOST)
            )
        return {"device_bytes": device, "host_bytes": host, "kv_tokens": self.kv_tokens}

    def moved_since(self, before: Usage) -> dict[str, float]:
        """Hits, misses, bytes moved and, if a page was selected, the hit ratio, since then."""
        if not self.is_hisparse:
            return {}
        found = {}
        for name in _MOVED:
            key = f"hisparse:{name}_total"
            found[name] = self.metrics.get(key, 0.0) - before.metrics.get(key, 0.0)
        selected = found["hit_pages"] + found["miss_pages"]
        return found | ({"hit_ratio": found["hit_pages"] / selected} if selected else {})
