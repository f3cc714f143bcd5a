"""The index: an SQLite file that says where each page is. It can be made from the segments."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sqlite3
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hisparse.storage.namespace import Header, Namespace, joined_keys, key_bytes, record_bytes
from hisparse.storage.report import NamespaceUse
from hisparse.storage.schema import (
    COLUMNS,
    DISAGREEMENT,
    INSERT,
    ORDERS,
    RUN,
    SCHEMA,
    TABLES,
    connect,
    copy_database,
    is_refusal,
    transaction,
)
from hisparse.storage.segments import RecordPlace

#: Keys of one statement; SQLite's own limit is higher.
_BATCH: Final = 500
#: Records that one statement looks for behind the first of a prefix: the fewest, and the most.
_FEW, _MANY = 64, 8192
#: Shorter runs of wanted pages are not worth their statement.
_SHORT: Final = 16
#: Reads, and seconds, after which they are to be written.
_MOST_USES: Final = 1024
_USES_PERIOD_S: Final = 10.0
_THIS_RECORD: Final = "namespace = ? AND key = ? AND segment = ? AND offset = ?"


class Row(NamedTuple):
    """A page in the index: number of its namespace, key, and place and bytes of its record."""

    namespace: int
    key: bytes
    place: RecordPlace
    num_bytes: int
    #: When it was last written or read, seconds since 1970.
    used: int


class Index:
    """Where pages are, and how they are used. Its methods may be called from any thread.

    Methods raise ``sqlite3.Error`` if SQLite cannot do it, such as on a full disk.

    Args:
        file: the database; None: one in memory.
        create: make its tables.
        source: copy a database that cannot be written.

    Raises:
        OSError: the file is absent, or another took its place while it was opened.

    Attributes:
        opened: the file as it was opened, since another may take its place; None: in memory.
    """

    def __init__(
        self, file: Path | None, *, create: bool = False, source: Path | None = None
    ) -> None:
        self._lock = threading.RLock()
        #: Pages that were read and are not written yet: the last second, and the number of times.
        self._uses: dict[tuple[int, bytes], tuple[int, int]] = {}
        self._uses_lock, self._uses_due_at = threading.Lock(), 0.0
        #: The thread with a transaction.
        self._writer: int | None = None
        if file is not None and create:
            file.touch()
        self.opened = None if file is None else os.stat(file)
        self._database = self._reads = connect(file)
        self._reads_lock = self._lock
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            if create:
                self._database.executescript(SCHEMA)
            if source:
                copy_database(source, self._database)
            if file is not None:
                # Look-ups of their own connection wait for no writer.
                self._reads, self._reads_lock = connect(file), threading.RLock()
                if self.opened and not os.path.samestat(os.stat(file), self.opened):
                    self._reads.close()
                    raise OSError(errno.ESTALE, "the index was replaced while it was opened")
        except (OSError, sqlite3.Error):
            self._database.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All changes inside, or none if an exception leaves the context."""
        with self._lock, transaction(self._database):
            self._writer = threading.get_ident()
            try:
                yield self._database
            finally:
                self._writer = None

    def _all(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        if self._writer == threading.get_ident():  # It sees what its transaction changed.
            return self._database.execute(statement, values).fetchall()
        with self._reads_lock:
            return self._reads.execute(statement, values).fetchall()

    def is_whole(self) -> bool:
        """Whether the tables are those of this version, and undamaged.

        Raises:
            sqlite3.OperationalError: the system refuses, which says nothing of the file.
        """
        try:
            with contextlib.closing(Index(None, create=True)) as other:
                if self._all(TABLES) != other._all(TABLES):
                    return False
            self.namespaces()
            is_sound = self._all("PRAGMA integrity_check(1)") == [("ok",)]
            return is_sound and self._all(DISAGREEMENT) == [(0,)]
        except (sqlite3.Error, ValueError) as error:  # Also text, and messages, that are not UTF-8.
            if is_refusal(error):
                raise
            return False

    def is_ready(self) -> bool:
        """Whether the index was whole once; it is extended since, page by page."""
        with contextlib.suppress(sqlite3.Error):
            return self._all("PRAGMA user_version") == [(1,)]
        return False

    def set_ready(self) -> None:
        """Note that all segments are in the index, for a process that finds it half done."""
        # After all was committed, and while no other process changes the index.
        if not self.is_ready():
            self._database.execute("PRAGMA user_version = 1")

    def close(self) -> None:
        """Let go of the file."""
        with self._lock, self._reads_lock:
            self._reads.close()
            self._database.close()

    # Namespaces.

    def namespace_id(self, namespace: Namespace) -> int | None:
        """Number of a namespace, or None if no page of it was stored."""
        found = self._all("SELECT id FROM namespaces WHERE text = ?", [namespace.text])
        return found[0][0] if found else None

    def namespaces(self) -> dict[int, Namespace]:
        """Every namespace by its number."""
        rows = self._all("SELECT id, text FROM namespaces")
        return {number: Namespace.parse(text) for number, text in rows}

    def namespace_uses(self) -> list[NamespaceUse]:
        """What namespaces hold, the largest first."""
        self.write_uses()
        rows = self._all(
            "SELECT namespace, count(*), sum(bytes), max(used) FROM pages GROUP BY namespace "
            "ORDER BY sum(bytes) DESC, namespace"
        )
        known = self.namespaces()
        return [
            NamespaceUse(namespace=known[number], pages=pages, bytes=size, last_used=used)
            for number, pages, size, used in rows
            if number in known
        ]

    # Pages.

    def find(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Row | None]:
        """Look up pages; None for each that is not there."""
        if (number := self.namespace_id(namespace)) is None:
            return [None] * len(keys)
        found: dict[bytes, Row] = {}
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            rule = f"namespace = ? AND key IN ({','.join('?' * len(batch))})"
            found |= {row.key: row for row in self._pages(rule, [number, *batch])}
        return [found.get(key) for key in keys]

    def find_prefix(self, namespace: Namespace, keys: Sequence[str], used_since: float) -> int:
        """How many pages are there and used since then, up to the first that is not.

        Pages of a prompt are written one after the other, so most lie side by side in a segment:
        one statement reads the keys that follow a page there. Where such runs are short, pages are
        looked up by their keys. A binary search would be wrong: a page can be absent while later
        ones are there, because it was evicted before them, refused or dropped as damaged.
        """
        if (number := self.namespace_id(namespace)) is None:
            return 0
        found, window = 0, _FEW
        # When a page was used is not in the order of places.
        scattered = bool(used_since)
        while found < len(keys):
            part = keys[found : found + (_BATCH if scattered else window)]
            if scattered or len(set(map(len, part))) > 1:
                rows = self.find(namespace, [key_bytes(key) for key in part])
                is_there = [row is not None and row.used >= used_since for row in rows]
                run = [*is_there, False].index(False)
                if run < len(part):
                    return found + run
                scattered = bool(used_since)
            else:
                run = self._run(number, part, record_bytes(namespace.page_bytes))
                if not run:
                    return found
                scattered = run < min(_SHORT, len(part))
                window = min(2 * window if run == len(part) else max(2 * run, _FEW), _MANY)
            found += run
        return found

    def _run(self, number: int, keys: Sequence[str], num_bytes: int) -> int:
        """How many of ``keys``, of one length, have records of ``num_bytes`` side by side."""
        wanted, width = joined_keys(keys), len(keys[0]) // 2
        values = [number, wanted[:width], len(keys) * num_bytes, number, width]
        stored: bytes = self._all(RUN, values)[0][0] or b""
        if stored.startswith(wanted):
            return len(keys)
        ends = range(width, len(wanted) + 1, width)
        return bisect_left(ends, True, key=lambda end: not stored.startswith(wanted[:end]))

    def _pages(self, rule: str, values: Sequence[object]) -> list[Row]:
        rows = self._all(f"SELECT {COLUMNS}, used FROM pages WHERE {rule}", values)
        uses = self._uses
        return [
            Row(ns, key, RecordPlace(*place), size, max(used, uses.get((ns, key), (0, 0))[0]))
            for ns, key, *place, size, used in rows
        ]

    def add(
        self, namespace: Namespace, key: bytes, place: RecordPlace, num_bytes: int, now: float
    ) -> bool:
        """Add a page that was just written; False if there is one already."""
        with self.transaction():
            if self.find(namespace, [key]) != [None]:
                return False
            self._insert(namespace, key, place, num_bytes, now)
            return True

    def recover(self, segment: int, pages: Iterable[tuple[int, Header]]) -> None:
        """Add pages that a segment has, by their offsets; of two with one key the newer stays."""
        with self.transaction():
            for offset, header in pages:
                place = RecordPlace(segment, offset)
                self._insert(header.namespace, header.key, place, header.num_bytes, header.written)

    def _insert(
        self, namespace: Namespace, key: bytes, place: RecordPlace, num_bytes: int, written: float
    ) -> None:
        insert, text = self._database.execute, namespace.text
        insert("INSERT OR IGNORE INTO namespaces (text) VALUES (?)", [text])
        self._extend(place.segment, place.offset + num_bytes)
        insert(INSERT, [text, key, *place, num_bytes, written, int(written)])

    def move(self, row: Row, place: RecordPlace) -> None:
        """Set the place of a page that was copied, unless it was dropped meanwhile."""
        with self.transaction() as database:
            self._extend(place.segment, place.offset + row.num_bytes)
            change = f"UPDATE pages SET segment = ?, offset = ? WHERE {_THIS_RECORD}"
            database.execute(change, [*place, row.namespace, row.key, *row.place])

    def drop(self, row: Row) -> bool:
        """Drop a page if it is still at this place. Returns whether it was."""
        with self.transaction() as database:
            values = [row.namespace, row.key, *row.place]
            found = database.execute(f"DELETE FROM pages WHERE {_THIS_RECORD}", values)
            return bool(found.rowcount)

    def remove(self, number: int | None, keys: Sequence[bytes] | None, used_before: float) -> int:
        """Drop pages of a namespace (None: all), with these keys (None: all), unused since then.

        Returns how many.
        """
        self.write_uses()
        if keys is not None:
            return self._delete([(number, key) for key in keys], used_before)
        rule = "" if number is None else f"AND namespace = {number} "
        removed, after = 0, (-1, b"")
        # In steps: others wait 10 s for their turn to write, and millions take longer.
        while rows := self._all(
            f"SELECT namespace, key FROM pages WHERE used <= ? {rule}AND (namespace, key) > (?, ?) "
            f"ORDER BY namespace, key LIMIT {_BATCH}",
            [used_before, *after],
        ):
            removed += self._delete(rows, used_before)
            after = rows[-1]
        return removed

    def _delete(self, pages: Iterable[tuple[Any, ...]], used_before: float = math.inf) -> int:
        """Drop pages by numbers of namespaces and keys. Returns how many there were."""
        with self.transaction() as database:
            rule = "namespace = ? AND key = ? AND used <= ?"
            rows = [(*page, used_before) for page in pages]
            return database.executemany(f"DELETE FROM pages WHERE {rule}", rows).rowcount

    def evict(self, policy: str, num_bytes: int, spared: Sequence[int]) -> int:
        """Drop so many bytes of pages, but none of ``spared`` segments. Returns how many pages."""
        self.write_uses()
        marks = ",".join("?" * len(spared))
        victims = []
        # Sorting takes seconds if there are millions: others write meanwhile.
        rows = self._reads.execute(
            f"SELECT namespace, key, bytes FROM pages WHERE segment NOT IN ({marks}) "
            f"ORDER BY {ORDERS[policy]}",
            spared,
        )
        while num_bytes > 0 and (row := rows.fetchone()):
            victims.append(row[:2])
            num_bytes -= row[2]
        rows.close()
        for start in range(0, len(victims), _BATCH):
            self._delete(victims[start : start + _BATCH])
        return len(victims)

    def use(self, namespace: Namespace, keys: Iterable[bytes], now: float) -> bool:
        """Remember that pages were read. Returns whether it is time to :meth:`write_uses`."""
        if (number := self.namespace_id(namespace)) is None:
            return False
        with self._uses_lock:
            for key in keys:
                times = self._uses.get((number, key), (0, 0))[1]
                self._uses[number, key] = int(now), times + 1
            return len(self._uses) > _MOST_USES or time.monotonic() > self._uses_due_at

    def write_uses(self) -> None:
        """Write which pages were read."""
        with self._uses_lock:
            uses, self._uses = self._uses, {}
            self._uses_due_at = time.monotonic() + _USES_PERIOD_S
        rows = [(used, times, *page) for page, (used, times) in uses.items()]
        if not rows:
            return
        try:
            with self.transaction() as database:
                database.executemany(
                    "UPDATE pages SET used = max(used, ?), uses = uses + ? "
                    "WHERE namespace = ? AND key = ?",
                    rows,
                )
        except sqlite3.Error:
            with self._uses_lock:
                self._uses = uses | self._uses
            raise

    # Segments.

    def _extend(self, segment: int, end: int) -> None:
        self._database.execute(
            "INSERT INTO segments VALUES (?, ?, 0) "
            "ON CONFLICT (id) DO UPDATE SET bytes = max(bytes, excluded.bytes)",
            [segment, end],
        )

    def segments(self) -> dict[int, tuple[int, int]]:
        """Bytes and live bytes of each segment by number."""
        rows = self._all("SELECT id, bytes, live FROM segments ORDER BY id")
        return {number: (num_bytes, live) for number, num_bytes, live in rows}

    def pages_of(self, segment: int) -> list[Row]:
        """The pages of a segment in the order of their offsets."""
        return self._pages("segment = ? ORDER BY offset", [segment])

    def ends(self) -> dict[int, int]:
        """Where the last record of each segment ends, by the segment's number."""
        return {number: num_bytes for number, (num_bytes, _) in self.segments().items()}

    def cut_segment(self, segment: int, end: int) -> int:
        """Forget all beyond the offset ``end``; 0: the whole segment. Returns the pages dropped."""
        with self.transaction() as database:
            rule = "DELETE FROM pages WHERE segment = ? AND offset + bytes > ?"
            dropped = database.execute(rule, [segment, end]).rowcount
            database.execute(
                "UPDATE segments SET bytes = "
                "(SELECT coalesce(max(offset + bytes), 0) FROM pages WHERE segment = segments.id) "
                "WHERE id = ?",
                [segment],
            )
            if not end:
                database.execute("DELETE FROM segments WHERE id = ?", [segment])
            return dropped
