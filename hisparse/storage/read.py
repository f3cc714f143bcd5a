"""Reads pages into callers' buffers, checks every byte, and drops what is damaged."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from hisparse.errors import one_line
from hisparse.storage.folder import Folder
from hisparse.storage.index import Row
from hisparse.storage.namespace import (
    BLOCK_BYTES,
    Namespace,
    checksum,
    checksums_in,
    read_header,
    record_bytes,
)
from hisparse.storage.report import Damage, StoreCounters, VerifyReport
from hisparse.storage.segments import OpenSegment

logger = logging.getLogger(__name__)

#: A page can be moved while it is looked up and read, again and again.
_TRIES: Final = 3


class Reader:
    """Reads pages of a store. Its methods may be called from any thread.

    Args:
        folder: of the store.
        counters: of the store.
    """

    def __init__(self, folder: Folder, counters: StoreCounters) -> None:
        self._folder, self._counters = folder, counters

    def read(self, namespace: Namespace, jobs: Sequence[tuple[int, Row, memoryview]]) -> list[int]:
        """Read pages.

        Args:
            namespace: of the pages.
            jobs: a number, where the page is, and as many bytes to fill as it has.

        Returns:
            The numbers of the pages that were read.
        """
        block = memoryview(bytearray(BLOCK_BYTES))
        return [i for i, row, view in jobs if self._read_one(namespace, row, view, block)]

    def verify(self) -> VerifyReport:
        """Read every page.

        Raises:
            OSError, sqlite3.Error: a file cannot be read at all.
        """
        index, block, damaged = self._folder.index, memoryview(bytearray(BLOCK_BYTES)), []
        pages, num_bytes, namespaces = 0, 0, index.namespaces()
        for segment in index.segments():
            for row in index.pages_of(segment):
                namespace = namespaces.get(row.namespace)
                reason: str | None
                if namespace is None:
                    reason = "unknown namespace"
                elif row.num_bytes != record_bytes(namespace.page_bytes):
                    reason = "size"
                else:
                    view = memoryview(bytearray(namespace.page_bytes))
                    reason = self._reason(namespace, row, view, block)
                pages, num_bytes = pages + 1, num_bytes + row.num_bytes
                if reason is not None and self.drop(row, reason):
                    name = self._folder.segments.path(segment).name
                    key, offset = row.key.hex(), row.place.offset
                    damaged.append(Damage(segment=name, offset=offset, key=key, reason=reason))
        return VerifyReport(pages=pages, bytes=num_bytes, damaged=tuple(damaged))

    def _read_one(
        self, namespace: Namespace, row: Row, view: memoryview, block: memoryview
    ) -> bool:
        try:
            for _ in range(_TRIES):
                reason = self._reason(namespace, row, view, block)
                if reason is None:
                    return True
                # A collection may have moved it meanwhile.
                (now,) = self._folder.index.find(namespace, [row.key])
                if now is None:
                    return False
                if now.place == row.place:
                    self.drop(row, reason)
                    return False
                row = now
        except (OSError, sqlite3.Error) as error:
            self._counters.add(read_errors=1)
            if self._counters.may_log("read_errors"):
                logger.warning("store %s: cannot read: %s", self._folder.path, one_line(error))
        return False

    def _reason(
        self, namespace: Namespace, row: Row, view: memoryview, block: memoryview
    ) -> str | None:
        """Read a page. Returns what is wrong with its record."""
        try:
            return self._twice(row, lambda found: _read_page(found, row, namespace, view, block))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return one_line(error)

    def record(self, row: Row) -> memoryview | None:
        """Read the whole record of a page, and check its header.

        Returns:
            The record; None: it is damaged, and the page was dropped.

        Raises:
            OSError: the record cannot be read; the page stays.
        """
        record = memoryview(bytearray(BLOCK_BYTES))

        def read(segment: OpenSegment) -> str | None:
            nonlocal record
            if segment.read([record[:BLOCK_BYTES]], row.place.offset) < BLOCK_BYTES:
                return "short"
            header = read_header(bytes(record[:BLOCK_BYTES]))
            # What a damaged index says may be more than there is memory.
            if header is None or (header.key, header.num_bytes) != (row.key, row.num_bytes):
                return "header"
            record = memoryview(bytearray(row.num_bytes))
            return "short" if segment.read([record], row.place.offset) < row.num_bytes else None

        reason = self._twice(row, read)
        if reason is not None:
            self.drop(row, reason)
        return record if reason is None else None

    def _twice(self, row: Row, read: Callable[[OpenSegment], str | None]) -> str | None:
        """Read from the segment of a page, and again from the file opened anew if that fails.

        Returns:
            What is wrong with the page's record.

        Raises:
            OSError: the system refuses.
        """
        reason = None
        for fresh in (False, True):
            try:
                reason = read(self._folder.segments.open(row.place.segment, fresh=fresh))
                if reason is None:
                    break
            except FileNotFoundError:
                reason = "no such segment"
            except OSError as error:
                if fresh:
                    raise
                reason = one_line(error)
        return reason

    def drop(self, row: Row, reason: str) -> bool:
        """Drop a damaged page; False if it was gone already."""
        if dropped := self._folder.index.drop(row):
            self._counters.add(damaged=1)
        if dropped and self._counters.may_log("damaged"):
            name = self._folder.segments.path(row.place.segment).name
            logger.warning(
                "store %s: page %s is dropped: %s at offset %d: %s",
                self._folder.path, row.key.hex(), name, row.place.offset, reason,
            )  # fmt: skip
        return dropped


def _read_page(
    segment: OpenSegment,
    row: Row,
    namespace: Namespace,
    view: memoryview,
    block: memoryview,
) -> str | None:
    """Read a page into ``view``. Returns what is wrong with it, or None."""
    num_bytes = segment.read([block, view], row.place.offset)
    if num_bytes < BLOCK_BYTES + namespace.page_bytes:
        return "short"
    if (checksums := checksums_in(block, namespace, row.key)) is None:
        return "header"
    bounds = pairwise(accumulate(namespace.part_bytes, initial=0))
    for number, ((first, end), expected) in enumerate(zip(bounds, checksums, strict=True)):
        if checksum(view[first:end]) != expected:
            return f"checksum of part {number}"
    return None
