"""What a soak expects of a store below host memory."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

from harness import Server
from plugins import make_plugin

from hisparse.storage import FileStore
from hisparse.units import parse_memory

#: Counters of a server to the names of the report; the last ones must stay 0.
_COUNTED = {
    "storage_offloaded_pages": "stored pages",
    "storage_loaded_pages": "loaded pages",
    "storage_failed_loads": "failed loads",
    "storage_late_calls": "late calls",
    "storage_lost_pages": "pages evicted before they were read",
}
_NEVER = ("storage_errors", "storage_damaged_pages")
#: Seconds without a change after which a store has ended what it does beside its server.
_STILL_S = 3.0
#: Each process may exceed the limit by a page.
_SLACK = 4 << 20

#: Writes what the store of each process has counted to a file: the processes are killed.
_LEDGER = """
    import json, os, threading, time
    from pathlib import Path

    from hisparse.storage import FileStore

    make, remove = FileStore.__init__, FileStore.remove

    def load():
        FileStore.__init__, FileStore.remove = make_and_watch, remove_and_count

    def make_and_watch(store, *args, **options):
        make(store, *args, **options)
        store.removed = 0
        threading.Thread(target=watch, args=(store,), daemon=True).start()

    def remove_and_count(store, *args, **options):
        number = remove(store, *args, **options)
        store.removed += number
        return number

    def watch(store):
        path = Path(__file__).with_name(f"{os.getpid()}-{time.time_ns()}.counters")
        while True:
            counted = store.counters | {"removed": store.removed}
            path.with_suffix(".new").write_text(json.dumps(counted))
            path.with_suffix(".new").replace(path)
            time.sleep(0.2)
"""


def make_ledger(folder: Path) -> Path:
    """A plug-in that writes counters of stores into ``folder``, which goes on the module path."""
    return make_plugin(folder, "store_ledger:load", _LEDGER)


def _read_ledger(folder: Path) -> Counter[str]:
    """What the stores of all servers until now have counted."""
    return sum((Counter(json.loads(x.read_text())) for x in folder.glob("*.counters")), Counter())


def wait_until_still(folder: Path) -> None:
    """Wait for puts and evictions, which go on after the answers."""
    counted, since, end = _read_ledger(folder), time.monotonic(), time.monotonic() + 60
    while time.monotonic() < min(since + _STILL_S, end):
        time.sleep(0.2)
        if (now := _read_ledger(folder)) != counted:
            counted, since = now, time.monotonic()


def count_pages(server: Server, counts: dict[str, int]) -> list[str]:
    """Add a server's counters to the counts of its scenario. Returns faults."""
    for name, title in _COUNTED.items():
        counts[title] = counts.get(title, 0) + int(server.counted(name)[0])
    faults = zip(_NEVER, server.counted(*_NEVER), strict=True)
    return [f"{name}: {value:g}" for name, value in faults if value]


def store_faults(
    path: Path, size: str, counts: dict[str, int], ledger: Path, *, filled: bool
) -> list[str]:
    """What is wrong with a store after its servers.

    Args:
        path: its folder.
        size: its limit.
        counts: of the scenario; "evicted pages" is added.
        ledger: folder of :func:`make_ledger`.
        filled: whether the requests were enough to fill it.
    """
    limit, faults, counted = int(parse_memory("size", size)), [], _read_ledger(ledger)
    with FileStore(path, create=False) as store:
        report, left = store.verify(), store.describe()
    faults += [f"page {x.key}: {x.reason}" for x in report.damaged]
    counts["evicted pages"], counts["pages at the end"] = counted["evicted"], left.pages
    if lost := counted["puts"] - counted["evicted"] - counted["removed"] - left.pages:
        faults.append(f"{lost} pages are lost: {left.pages} are left, and the stores {counted}")
    if left.bytes > limit + _SLACK:
        faults.append(f"the store has {left.bytes} bytes, its limit is {limit}")
    if not counts["loaded pages"]:
        faults.append("no page was read from the store")
    if filled and not counts["evicted pages"]:
        faults.append("no page left the store")
    return faults
