"""What a server's storage counts and keeps of the model, and whether it may be used."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

logger = logging.getLogger("hisparse")

#: Name of each counter, and what it counts.
COUNTERS: Final = {
    "storage_found_pages": "Pages that lookups found; a waiting request repeats its lookup",
    "storage_absent_pages": "Pages that lookups did not find; a waiting request repeats its lookup",
    "storage_loaded_pages": "Pages read from the store into host memory",
    "storage_loaded_bytes": "Bytes read from the store into host memory",
    "storage_load_ms": "Time that loads took, in milliseconds",
    "storage_built_pages": "Loaded pages whose representations are built from their keys",
    "storage_failed_loads": "Loads that did not get all pages; their requests compute the prompt",
    "storage_damaged_pages": "Pages that were read with a wrong checksum, and not used",
    "storage_lost_pages": "Pages that were looked up and found, and then not read",
    "storage_offloaded_pages": "Pages written to the store",
    "storage_offloaded_bytes": "Bytes written to the store",
    "storage_known_pages": "Pages that were not written because the store has them",
    "storage_inexact_pages": "Pages that were not written because sparse steps led to them",
    "storage_failed_offloads": "Groups of pages that were not written, or not all of them",
    "storage_swapped_pages": "Pages of retracted requests that were written to the store",
    "storage_swapped_in_pages": "Pages of retracted requests that were read back",
    "storage_failed_swaps": "Retracted requests whose pages were not written, or not read back",
    "storage_late_calls": "Calls to the store that took longer than timeout_s",
    "storage_errors": "Calls to the store that ended with an error",
}


class StorageCounters:
    """Totals since the start; threads may add at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(COUNTERS, 0)

    def add(self, **amounts: int) -> None:
        """Add to counters, named without ``storage_``."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[f"storage_{name}"] += amount

    def totals(self) -> dict[str, int]:
        """All totals, by the names of :data:`COUNTERS`."""
        with self._lock:
            return dict(self._totals)


@dataclass(kw_only=True)
class StorageState:
    """The state of one rank.

    Attributes:
        model: SGLang's model.
        model_config: the model's configuration, of transformers.
        model_settings: its settings that differ from defaults.
        counters: of what the storage does.
        adapter_key: takes SGLang's id of a LoRA adapter; the adapter's name in keys of pages.
        rests: whether the storage is not used: until a flush of all ranks, since the pages in host
            memory may be of other weights.
        fingerprint: of the model, taken at its last flush; "": an update began since.
        weight_updater: SGLang's manager of updates; None: none has begun.
    """

    model: Any
    model_config: Any
    model_settings: Mapping[str, object]
    counters: StorageCounters = field(default_factory=StorageCounters)
    adapter_key: Callable[[str], str] | None = None
    rests: bool = True
    fingerprint: str = ""
    weight_updater: Any = None

    def note_update(self, updater: Any) -> None:
        """Let the storage rest until a flush: host memory has K and V of the old weights.

        Args:
            updater: SGLang's ``SchedulerWeightUpdaterManager``, whose update begins, goes on or
                ends. It may fail midway, and weights may come by RDMA until it ends.
        """
        if self.fingerprint:
            logger.warning(
                "hisparse: storage: an update of the weights began; the store is not used until a "
                "flush after its end (/flush_cache, unless the update flushes itself)"
            )
        self.rests, self.fingerprint, self.weight_updater = True, "", updater

    @property
    def update_is_open(self) -> bool:
        """Whether SGLang waits for more weights: from ``begin`` to ``end_weight_update``."""
        return self.weight_updater is not None and self.weight_updater._session is not None
