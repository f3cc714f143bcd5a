"""Eviction, and copying what is left of old segments together so that their space is given back."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from hisparse.storage.folder import Folder
from hisparse.storage.index import Index, Row
from hisparse.storage.limits import Limits
from hisparse.storage.record import read_header
from hisparse.storage.segments import SegmentWriter, locked

__all__ = ["Collected", "collect"]

#: Evictions of one collection: each is followed by looking what can be given back.
_ROUNDS: Final = 16


class Collected(NamedTuple):
    """What a collection did: pages evicted, and bytes given back to the file system."""

    pages: int
    num_bytes: int


def collect(
    folder: Folder,
    index: Index,
    writer: SegmentWriter,
    limits: Limits,
    min_live_ratio: float,
    room: int,
    now: float,
) -> Collected:
    """Drop expired pages; above the high-water mark evict to the low one; give space back.

    Args:
        folder: of the store.
        index: of the store.
        writer: takes what is copied.
        limits: of the store.
        min_live_ratio: segments with less live bytes than this share of theirs are copied.
        room: bytes that are wanted besides what is there.
        now: seconds since 1970.

    Raises:
        OSError: the system refuses; what was not copied stays where it is.
        sqlite3.Error: SQLite cannot do it.
    """
    with folder.collecting() as alone:
        if not alone:
            return Collected(0, 0)
        pages, num_bytes = 0, 0
        if limits.ttl_s is not None:
            pages = index.remove(None, None, limits.used_since(now))
        _seal_if_sparse(index, writer, min_live_ratio)
        num_bytes = _compact(folder, index, writer, min_live_ratio)
        size = limits.size_bytes
        if size is None or index.num_bytes() + room <= limits.high_water * size:
            return Collected(pages, num_bytes)
        spared = folder.segments.busy()
        for _ in range(_ROUNDS):
            excess = index.num_bytes() + room - int(limits.low_water * size)
            if excess <= 0 or not (evicted := index.evict(limits.policy, excess, spared)):
                break
            pages += evicted
            num_bytes += _compact(folder, index, writer, min_live_ratio)
        return Collected(pages, num_bytes)


def _seal_if_sparse(index: Index, writer: SegmentWriter, min_live_ratio: float) -> None:
    with writer.lock:
        size, live = index.segments().get(writer.segment or 0, (0, 0))
        if live < min_live_ratio * size:
            writer.seal()


def _compact(folder: Folder, index: Index, writer: SegmentWriter, min_live_ratio: float) -> int:
    """Copy what lives in sparse segments, and delete them. Returns the bytes given back."""
    indexed, freed = index.segments(), 0
    for segment, size in folder.segments.sizes().items():
        live = indexed.get(segment, (0, 0))[1]
        if size and live >= min_live_ratio * size:
            continue
        with locked(folder.segments.path(segment)) as free:
            if free:
                copied = sum(_copy(folder, index, writer, row) for row in index.pages_of(segment))
                writer.flush()
                folder.segments.delete(segment)
                index.cut_segment(segment, 0)
                freed += size - copied
    return freed


def _copy(folder: Folder, index: Index, writer: SegmentWriter, row: Row) -> int:
    """Copy a record and drop it if it is damaged. Returns the bytes copied."""
    fd = folder.segments.open(row.place.segment).fd
    record = os.pread(fd, row.num_bytes, row.place.offset)
    header = read_header(record)
    if header is None or header.key != row.key or header.num_bytes != len(record):
        index.drop(row)
        return 0
    with writer.lock:
        index.move(row, writer.append([memoryview(record)], adopt=False))
    return row.num_bytes
