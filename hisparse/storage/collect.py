"""How large a store may grow, which pages leave first, and how their space is given back."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted, unknown_name
from hisparse.storage.contexts import Contexts, contexts_path
from hisparse.storage.folder import Folder
from hisparse.storage.index import Index, Row
from hisparse.storage.read import Reader
from hisparse.storage.report import StoreCounters
from hisparse.storage.schema import ORDERS
from hisparse.storage.segments import SegmentWriter
from hisparse.units import MemorySize, parse_memory

logger = logging.getLogger(__name__)

#: Segments with less live bytes are not worth their space.
MIN_LIVE_RATIO: Final = 0.5
#: Shares of the size at which eviction begins and ends.
HIGH_WATER, LOW_WATER = 0.95, 0.85

#: Evictions of one collection: each is followed by looking what can be given back.
_ROUNDS: Final = 16
#: Seconds between collections that puts begin.
_PAUSE_S: Final = 1.0


@dataclass(frozen=True)
class StoreLimits:
    """How large a store may grow, and which pages leave first; see :class:`FileStore`.

    Raises:
        ConfigError: a value is out of range.
    """

    size_bytes: int | None
    policy: str
    ttl_s: float | None

    def __post_init__(self) -> None:
        if self.policy not in ORDERS:
            raise ConfigError(unknown_name("policy", self.policy, ORDERS))
        if self.size_bytes is not None and not 0 < self.size_bytes < 2**63:
            got = quoted(self.size_bytes)
            raise ConfigError(f"size_bytes: got {got}, expected more than 0, below 8 EiB")
        if self.policy == "ttl":
            if self.ttl_s is None or not (self.ttl_s > 0 and math.isfinite(self.ttl_s)):
                got = quoted(self.ttl_s)
                raise ConfigError(f"ttl_s: got {got}, expected seconds above 0 for policy 'ttl'")
        elif self.ttl_s is not None:
            got = f"ttl_s {self.ttl_s} with policy {self.policy!r}"
            raise ConfigError(f"got {got}, expected it with policy 'ttl' alone")

    def used_since(self, now: float) -> float:
        """Pages that were last used before this time are expired."""
        return 0.0 if self.ttl_s is None else now - self.ttl_s


def size_in_bytes(key: str, size: MemorySize | None, folder: Path) -> int | None:
    """The limit of a store in bytes; None: no limit.

    Args:
        key: name of the setting, for messages.
        size: the setting; a fraction is of the file system's size.
        folder: of the store, which need not exist.

    Raises:
        ConfigError: the value is neither a size nor a fraction.
    """
    parsed = None if size is None else parse_memory(key, size)
    if isinstance(parsed, float):
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        return int(parsed * shutil.disk_usage(existing).total)
    return parsed


class Collector:
    """Evicts pages of a store and gives space back. Its methods may be called from any thread.

    Args:
        writer: takes what is copied.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        folder: Folder,
        reader: Reader,
        writer: SegmentWriter,
        limits: StoreLimits,
        counters: StoreCounters,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._reader, self._writer = folder, reader, writer
        self._limits, self._counters, self._clock = limits, counters, clock
        self._thread: threading.Thread | None = None
        self._lock, self._not_before = threading.Lock(), 0.0
        self._stopping = threading.Event()

    def run_soon(self, room: int) -> None:
        """Collect in another thread, unless one is at it or has just ended; see :meth:`run`."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if not running and time.monotonic() >= self._not_before:
                self._thread = threading.Thread(target=self._run_alone, args=(room,), daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread after the record that it copies."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run_alone(self, room: int) -> None:
        try:
            self.run(MIN_LIVE_RATIO, room)
        except (OSError, sqlite3.Error) as error:
            logger.warning("store %s: cannot collect: %s", self._folder.path, one_line(error))
        self._not_before = time.monotonic() + _PAUSE_S

    def run(self, min_live_ratio: float, room: int = 0, size_bytes: int | None = None) -> int:
        """Collect, as :meth:`FileStore.collect` says; contexts whose pages have all left go too.

        Args:
            min_live_ratio: segments with less live bytes than this share of theirs are copied.
            room: bytes that are wanted in addition to those that are free.
            size_bytes: evict down to this; None: by the marks of the store.

        Returns:
            Bytes given back; 0 if another thread or process is at it.
        """
        self._folder.check_index()
        self._folder.index.write_uses()
        with (
            self._folder.collecting() as alone,
            contextlib.closing(self._folder.open_index()) as index,
        ):
            if not alone:
                return 0
            limits = self._limits
            if limits.ttl_s is not None:
                expired = index.remove(None, None, limits.used_since(self._clock()))
                self._counters.add(evicted=expired)
            self._seal(index, min_live_ratio)
            freed = self._compact(index, min_live_ratio)
            high = low = size_bytes
            if size_bytes is None and limits.size_bytes is not None:
                high, low = (int(x * limits.size_bytes) for x in (HIGH_WATER, LOW_WATER))
            used = self._folder.num_bytes(index) + room
            if high is not None and low is not None and used > high:
                freed += self._make_room(index, min_live_ratio, used - low)
            self._forget_contexts(index)
            return freed

    def _make_room(self, index: Index, min_live_ratio: float, excess: int) -> int:
        """Evict until so many bytes are given back. Returns the bytes given back."""
        # Counted once: pages that are put meanwhile took the room that was made for them.
        spared, freed = self._folder.segments.busy(), 0
        for _ in range(_ROUNDS):
            if self._stopping.is_set() or freed >= excess:
                break
            if not (evicted := index.evict(self._limits.policy, excess - freed, spared)):
                break
            self._counters.add(evicted=evicted)
            freed += self._compact(index, min_live_ratio)
        return freed

    def _forget_contexts(self, index: Index) -> None:
        """Remove contexts whose pages have all left; none while pages may be there unread."""
        if not contexts_path(self._folder.path).exists() or not self._folder.read_on(index):
            return
        namespaces = {each.key_bytes: each for each in index.namespaces().values()}

        def stored(namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
            known = namespaces.get(namespace)
            rows = [None] * len(keys) if known is None else index.find(known, keys)
            return [row is not None for row in rows]

        try:
            with contextlib.closing(Contexts(self._folder.path, None)) as contexts:
                contexts.forget_absent(stored)
        except HiSparseError as error:
            self._counters.warn("contexts", str(error))

    def _seal(self, index: Index, min_live_ratio: float) -> None:
        """Close the segment that is being written if it is full or sparse."""
        writer = self._writer
        with writer.lock:
            size, live = index.segments().get(writer.segment or 0, (0, 0))
            if writer.is_full or live < min_live_ratio * size:
                writer.seal()

    def _compact(self, index: Index, min_live_ratio: float) -> int:
        """Copy what lives in sparse segments, and delete them. Returns the bytes given back."""
        segments, freed = self._folder.segments, 0
        # In this order: a file that comes later, such as one that is renamed, may have the only
        # copy of pages that the index still knows in another.
        sizes = segments.sizes()
        self._folder.read_on(index)
        indexed = index.segments()
        sparse = [
            segment
            for segment, size in sizes.items()
            if not size or indexed.get(segment, (0, 0))[1] < min_live_ratio * size
        ]
        # What needs no copy comes first: a full disk may have room for copies afterwards.
        for segment in sorted(sparse, key=lambda x: indexed.get(x, (0, 0))[1] > 0):
            if self._stopping.is_set():
                break
            try:
                freed += self._give_back(index, segment)
            except OSError as error:
                if self._folder.read_only:  # The index is not that of the folder any more.
                    raise
                logger.warning(
                    "store %s: %s is not collected: %s",
                    self._folder.path, segments.path(segment).name, one_line(error),
                )  # fmt: skip
        return freed

    def _give_back(self, index: Index, segment: int) -> int:
        """Copy the pages of a segment and delete it, unless a process is writing it.

        Returns the bytes given back. The file stays if a page cannot be read or written.
        """
        segments, copied = self._folder.segments, 0
        with segments.locked(segment) as free:
            if not free:
                return 0
            # Its last writer may have appended until now.
            self._folder.read_segment(index, segment)
            size = segments.open(segment, fresh=True).num_bytes
            rows, (_, live) = index.pages_of(segment), index.segments().get(segment, (0, 0))
            if sum(row.num_bytes for row in rows) < live:
                return 0  # Pages leave at this time, or the index is damaged and lacks some.
            for row in rows:
                if self._stopping.is_set():
                    return 0
                copied += self._copy(index, row)
            # What was on the disk stays there.
            self._writer.flush()
            self._folder.check_index()
            segments.delete(segment)
            index.cut_segment(segment, 0)
        self._counters.add(collected_bytes=size - copied)
        return size - copied

    def _copy(self, index: Index, row: Row) -> int:
        """Copy a record, or drop it if its header is damaged. Returns the bytes copied."""
        if (record := self._reader.record(row)) is None:
            return 0
        with self._writer.lock:
            self._folder.check_index()
            index.move(row, self._writer.append([record], adopt=False))
        return row.num_bytes
