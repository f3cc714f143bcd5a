"""Reads pages into callers' buffers, checks every byte, and drops what is damaged."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from hisparse.errors import one_line
from hisparse.storage.folder import Folder
from hisparse.storage.index import Row
from hisparse.storage.namespace import BLOCK_BYTES, Namespace, damaged_part, read_header
from hisparse.storage.report import Damage, StoreCounters, VerifyReport
from hisparse.storage.segments import OpenSegment

#: A page can be moved while it is looked up and read, again and again.
_TRIES: Final = 3
_T = TypeVar("_T")


class _DamagedError(Exception):
    """A record is not what it should be; the message says why."""


class Reader:
    """Reads pages of a store. Its methods may be called from any thread."""

    def __init__(self, folder: Folder, counters: StoreCounters) -> None:
        self._folder, self._counters = folder, counters

    def read(self, namespace: Namespace, jobs: Sequence[tuple[int, Row, memoryview]]) -> list[int]:
        """Read pages: a number, where the page is, and as many bytes to fill as it has.

        Returns the numbers of the pages that were read.
        """
        block = memoryview(bytearray(BLOCK_BYTES))
        return [i for i, row, view in jobs if self._read_one(namespace, row, view, block)]

    def verify(self) -> VerifyReport:
        """Read every page."""
        index, damaged = self._folder.index, []
        pages, num_bytes, namespaces = 0, 0, index.namespaces()
        for segment in index.segments():
            for row in index.pages_of(segment):
                pages, num_bytes = pages + 1, num_bytes + row.num_bytes
                reason = self._damage(row, partial(_read_record, row, namespaces))
                if reason is not None and self._drop(row, reason):
                    name = self._folder.segments.path(segment).name
                    key, offset = row.key.hex(), row.place.offset
                    damaged.append(Damage(segment=name, offset=offset, key=key, reason=reason))
        return VerifyReport(pages=pages, bytes=num_bytes, damaged=tuple(damaged))

    def record(self, row: Row) -> memoryview | None:
        """Read the whole record of a page; None: it is damaged, and the page was dropped.

        Raises:
            OSError: the record cannot be read; the page stays.
        """
        try:
            return self._twice(row, partial(_read_record, row, None))
        except _DamagedError as error:
            self._drop(row, str(error))
            return None

    def _read_one(
        self, namespace: Namespace, row: Row, view: memoryview, block: memoryview
    ) -> bool:
        try:
            for _ in range(_TRIES):
                reason = self._damage(row, partial(_read_page, row, namespace, view, block))
                if reason is None:
                    return True
                # A collection may have moved it meanwhile.
                (now,) = self._folder.index.find(namespace, [row.key])
                if now is None:
                    return False
                if now.place == row.place:
                    self._drop(row, reason)
                    return False
                row = now
        except (OSError, sqlite3.Error) as error:
            self._counters.add(read_errors=1)
            self._counters.warn("read_errors", f"cannot read: {one_line(error)}")
        return False

    def _damage(self, row: Row, read: Callable[[OpenSegment], object]) -> str | None:
        """Read a page. Returns what is wrong with its record, or None."""
        try:
            self._twice(row, read)
        except _DamagedError as error:
            return str(error)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return one_line(error)
        return None

    def _twice(self, row: Row, read: Callable[[OpenSegment], _T]) -> _T:
        """Read from the segment of a page, and again from the file opened anew if that fails."""
        try:
            try:
                return read(self._folder.segments.open(row.place.segment))
            except (OSError, _DamagedError):
                return read(self._folder.segments.open(row.place.segment, fresh=True))
        except FileNotFoundError:
            raise _DamagedError("no such segment") from None

    def _drop(self, row: Row, reason: str) -> bool:
        """Drop a damaged page; False if it was gone already."""
        if dropped := self._folder.index.drop(row):
            self._counters.add(damaged=1)
            file = f"{self._folder.segments.path(row.place.segment).name} at offset"
            text = f"page {row.key.hex()} is dropped: {file} {row.place.offset}: {reason}"
            self._counters.warn("damaged", text)
        return dropped


def _read_page(
    row: Row, namespace: Namespace, view: memoryview, block: memoryview, segment: OpenSegment
) -> None:
    """Read a page into ``view``, and its header into ``block``."""
    if segment.read([block, view], row.place.offset) < BLOCK_BYTES + namespace.page_bytes:
        raise _DamagedError("short")
    header = read_header(block)
    if header is None or header.key != row.key:
        raise _DamagedError("header")
    if header.namespace.key_bytes != namespace.key_bytes:
        raise _DamagedError("header")
    if reason := damaged_part(view, header):
        raise _DamagedError(reason)


def _read_record(
    row: Row, namespaces: Mapping[int, Namespace] | None, segment: OpenSegment
) -> memoryview:
    """Read a record. It must be of the namespace that has its number, if these are given."""
    block = memoryview(bytearray(BLOCK_BYTES))
    if segment.read([block], row.place.offset) < BLOCK_BYTES:
        raise _DamagedError("short")
    header = read_header(block)
    # What a damaged index says may be more than there is memory.
    if header is None or (header.key, header.num_bytes) != (row.key, row.num_bytes):
        raise _DamagedError("header")
    if namespaces is not None and namespaces.get(row.namespace) != header.namespace:
        raise _DamagedError("namespace")
    record = memoryview(bytearray(row.num_bytes))
    if segment.read([record], row.place.offset) < row.num_bytes:
        raise _DamagedError("short")
    if reason := damaged_part(record[BLOCK_BYTES:], header):
        raise _DamagedError(reason)
    return record
