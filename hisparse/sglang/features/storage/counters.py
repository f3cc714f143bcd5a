"""What the storage below host memory has done, counted in pages of SGLang."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["COUNTERS", "StorageCounters"]

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
