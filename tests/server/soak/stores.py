"""What a soak expects of a store below host memory."""

from __future__ import annotations

from pathlib import Path

from harness import Server

from hisparse.storage import FileStore
from hisparse.units import parse_memory

__all__ = ["count_pages", "store_faults"]

#: Counters of a server to the names of the report; the last ones must stay 0.
_COUNTED = {
    "storage_offloaded_pages": "stored pages",
    "storage_loaded_pages": "loaded pages",
    "storage_failed_loads": "failed loads",
    "storage_late_calls": "late calls",
}
_NEVER = ("storage_errors", "storage_damaged_pages")
#: A segment is 4 MiB at this size. One may be in the making, and one may be copied.
_SLACK = 2 * (4 << 20)


def count_pages(server: Server, counts: dict[str, int]) -> list[str]:
    """Add a server's counters to the counts of its scenario. Returns faults."""
    for name, title in _COUNTED.items():
        counts[title] = counts.get(title, 0) + int(server.counted(name)[0])
    faults = zip(_NEVER, server.counted(*_NEVER), strict=True)
    return [f"{name}: {value:g}" for name, value in faults if value]


def store_faults(path: Path, size: str, counts: dict[str, int], *, filled: bool) -> list[str]:
    """What is wrong with a store after its servers.

    Args:
        path: its folder.
        size: its limit.
        counts: of the scenario; "evicted pages" is added.
        filled: whether the requests were enough to fill it.
    """
    limit, faults = int(parse_memory("size", size)), []
    with FileStore(path, create=False) as store:
        report, left = store.verify(), store.describe()
    faults += [f"{x.segment} at {x.offset}: {x.reason}" for x in report.damaged]
    counts["evicted pages"] = max(0, counts["stored pages"] - left.pages)
    if left.segment_bytes > limit + _SLACK:
        faults.append(f"the store has {left.segment_bytes} bytes, its limit is {limit}")
    if not counts["loaded pages"]:
        faults.append("no page was read from the store")
    if filled and not counts["evicted pages"]:
        faults.append("no page left the store")
    return faults
