"""The index: an SQLite file that says where each page is. It can be made from the segments."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hisparse.storage.namespace import Header, Namespace, key_bytes, record_bytes
from hisparse.storage.prefix import PrefixSearch
from hisparse.storage.report import NamespaceUse
from hisparse.storage.schema import (
    COLUMNS,
    DISAGREEMENT,
    INSERT,
    OR_REPLACE,
    ORDERS,
    SCHEMA,
    TABLES,
    is_refusal,
    transaction,
)
from hisparse.storage.segments import RecordPlace
from hisparse.storage.uses import RecentUses

#: Keys of one statement; SQLite's own limit is higher.
_BATCH: Final = 500
#: Seconds to wait for other processes.
_WAIT_S: Final = 10.0


class Row(NamedTuple):
    """A page in the index.

    Attributes:
        namespace: number of its namespace.
        key: its key.
        place: where its record is.
        num_bytes: bytes of the record.
        used: when it was last written or read, seconds since 1970.
    """

    namespace: int
    key: bytes
    place: RecordPlace
    num_bytes: int
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
        self._lock, self._uses = threading.RLock(), RecentUses()
        #: The thread with a transaction.
        self._writer: int | None = None
        self._ids: dict[str, int] = {}
        if file is not None and create:
            file.touch()
        self.opened = None if file is None else os.stat(file)
        self._database = self._reads = self._connect(file)
        self._reads_lock = self._lock
        try:
            # The file survives a loss of power, though not its last transactions.
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            if create:
                self._database.executescript(SCHEMA)
            if source:
                name = f"{source.as_uri()}?mode=ro&immutable=1"
                with contextlib.closing(sqlite3.connect(name, uri=True)) as database:
                    database.backup(self._database)
            if file is not None:
                # Look-ups of their own connection wait for no writer.
                self._reads, self._reads_lock = self._connect(file), threading.RLock()
                if self.opened and not os.path.samestat(os.stat(file), self.opened):
                    self._reads.close()
                    raise OSError(errno.ESTALE, "the index was replaced while it was opened")
        except (OSError, sqlite3.Error):
            self._database.close()
            raise

    @staticmethod
    def _connect(file: Path | None) -> sqlite3.Connection:
        return sqlite3.connect(
            file or ":memory:", timeout=_WAIT_S, isolation_level=None, check_same_thread=False
        )

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
            if self._all("PRAGMA integrity_check(1)") != [("ok",)]:
                return False
            if self._all(DISAGREEMENT) != [(0,)]:
                return False
            self.namespaces()
            return True
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
        """Note that all segments are in the index, for a process that finds it half done.

        It is noted after all was committed, while no other process changes the index. So an index
        that is ready was whole; one whose process ended before this is read once more.
        """
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
        if (known := self._ids.get(namespace.text)) is not None:
            return known
        found = self._all("SELECT id FROM namespaces WHERE text = ?", [namespace.text])
        if not found:
            return None
        if self._writer != threading.get_ident():  # A transaction may fail.
            self._ids[namespace.text] = found[0][0]
        return int(found[0][0])

    def _make_namespace_id(self, namespace: Namespace) -> int:
        """Number of a namespace that is to be there; inside of a transaction."""
        if (found := self.namespace_id(namespace)) is not None:
            return found
        self._database.execute("INSERT INTO namespaces (text) VALUES (?)", [namespace.text])
        return int(self._all("SELECT last_insert_rowid()")[0][0])

    def namespaces(self) -> dict[int, Namespace]:
        """Every namespace by its number.

        Raises:
            ConfigError: the text of one is damaged.
        """
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
        """How many pages are there and used since then, up to the first that is not."""
        if (number := self.namespace_id(namespace)) is None:
            return 0
        size, found = record_bytes(namespace.page_bytes), 0
        search = PrefixSearch(self._all, number, size, used_since)
        while (found := search.end(keys, found)) < len(keys) and used_since:
            (row,) = self.find(namespace, [key_bytes(keys[found])])
            if row is None or row.used < used_since:
                break
            found += 1  # It was read since, which is not written yet.
        return found

    def _pages(self, rule: str, values: Sequence[object]) -> list[Row]:
        rows = self._all(f"SELECT {COLUMNS}, used FROM pages WHERE {rule}", values)
        last = self._uses.last
        return [
            Row(ns, key, RecordPlace(*place), size, max(used, last((ns, key))))
            for ns, key, *place, size, used in rows
        ]

    def add(
        self, namespace: Namespace, key: bytes, place: RecordPlace, num_bytes: int, now: float
    ) -> bool:
        """Add a page that was just written; False if there is one already."""
        with self.transaction() as database:
            if self.find(namespace, [key]) != [None]:
                return False
            number = self._make_namespace_id(namespace)
            self._extend(place.segment, place.offset + num_bytes)
            database.execute(INSERT, [number, key, *place, num_bytes, now, int(now)])
            return True

    def recover(self, segment: int, pages: Iterable[tuple[int, Header]]) -> None:
        """Add pages that a segment has, by their offsets; of two with one key the newer stays."""
        with self.transaction() as database:
            for offset, header in pages:
                self._extend(segment, offset + header.num_bytes)
                number, written = self._make_namespace_id(header.namespace), header.written
                values = [number, header.key, segment, offset, header.num_bytes]
                database.execute(INSERT + OR_REPLACE, [*values, written, int(written)])

    def move(self, row: Row, place: RecordPlace) -> None:
        """Set the place of a page that was copied, unless it was dropped meanwhile."""
        with self.transaction() as database:
            self._extend(place.segment, place.offset + row.num_bytes)
            database.execute(
                "UPDATE pages SET segment = ?, offset = ? "
                "WHERE namespace = ? AND key = ? AND segment = ? AND offset = ?",
                [*place, row.namespace, row.key, *row.place],
            )

    def drop(self, row: Row) -> bool:
        """Drop a page if it is still at this place. Returns whether it was."""
        with self.transaction() as database:
            rule = "namespace = ? AND key = ? AND segment = ? AND offset = ?"
            values = [row.namespace, row.key, *row.place]
            return bool(database.execute(f"DELETE FROM pages WHERE {rule}", values).rowcount)

    def remove(self, number: int | None, keys: Sequence[bytes] | None, used_before: float) -> int:
        """Drop pages of a namespace, with these keys, and unused since; None: whatever they are.

        Returns:
            The number of pages.
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
        """Drop pages of at least ``num_bytes`` bytes by a policy, but none of ``spared`` segments.

        Returns:
            The number of pages.
        """
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
        return self._uses.add([(number, key) for key in keys], now)

    def write_uses(self) -> None:
        """Write which pages were read."""
        if not (uses := self._uses.take()):
            return
        rows = [(used, times, *page) for page, (used, times) in uses.items()]
        try:
            with self.transaction() as database:
                database.executemany(
                    "UPDATE pages SET used = max(used, ?), uses = uses + ? "
                    "WHERE namespace = ? AND key = ?",
                    rows,
                )
        except sqlite3.Error:
            self._uses.give_back(uses)
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

    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return int(self._all("SELECT coalesce(sum(bytes), 0) FROM segments")[0][0])

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
