"""The tables of the index, what is always true of them, and when SQLite cannot say."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hisparse.storage.namespace import BLOCK_BYTES, END_OF_TIME

#: Seconds to wait for other processes.
_WAIT_S: Final = 10.0

#: What tables there are: an index with others is made anew.
TABLES: Final = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"

#: Damage that leaves no trace but another type is found when the database is checked.
_INTEGERS: Final = " AND ".join(
    f"typeof({name}) = 'integer'" for name in ("segment", "offset", "bytes", "used", "uses")
)
_BLOCKS: Final = f"offset % {BLOCK_BYTES} = 0 AND bytes % {BLOCK_BYTES} = 0"
SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE namespaces (
    id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, CHECK (typeof(text) = 'text')
);
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, bytes INTEGER NOT NULL, live INTEGER NOT NULL,
    CHECK (typeof(bytes) = 'integer' AND bytes % {BLOCK_BYTES} = 0 AND typeof(live) = 'integer')
);
CREATE TABLE pages (
    namespace INTEGER NOT NULL, key BLOB NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, bytes INTEGER NOT NULL,
    written REAL NOT NULL, used INTEGER NOT NULL, uses INTEGER NOT NULL,
    PRIMARY KEY (namespace, key),
    CHECK (typeof(key) = 'blob' AND offset >= 0 AND bytes > 0 AND {_BLOCKS} AND {_INTEGERS}
        AND used BETWEEN 0 AND {END_OF_TIME:.0f})
) WITHOUT ROWID;
CREATE INDEX pages_by_segment ON pages (segment, offset, bytes);
CREATE TRIGGER added AFTER INSERT ON pages BEGIN
    UPDATE segments SET live = live + new.bytes WHERE id = new.segment;
END;
CREATE TRIGGER removed AFTER DELETE ON pages BEGIN
    UPDATE segments SET live = live - old.bytes WHERE id = old.segment;
END;
CREATE TRIGGER moved AFTER UPDATE OF segment ON pages BEGIN
    UPDATE segments SET live = live - old.bytes WHERE id = old.segment;
    UPDATE segments SET live = live + new.bytes WHERE id = new.segment;
END;
COMMIT;
"""

#: Where a page is.
COLUMNS: Final = "namespace, key, segment, offset, bytes"
#: Of two records with one key the newer stays.
INSERT: Final = f"""
INSERT INTO pages ({COLUMNS}, written, used, uses)
VALUES ((SELECT id FROM namespaces WHERE text = ?), ?, ?, ?, ?, ?, ?, 1)
ON CONFLICT (namespace, key) DO UPDATE SET segment = excluded.segment, offset = excluded.offset,
    bytes = excluded.bytes, written = excluded.written WHERE excluded.written > pages.written
"""
#: Keys of one length that lie in a segment from one of them on, joined; None if it is absent.
RUN: Final = """
WITH first AS (SELECT segment, offset FROM pages WHERE namespace = ? AND key = ?)
SELECT CAST(group_concat(page.key, '') AS BLOB)
FROM first CROSS JOIN pages AS page INDEXED BY pages_by_segment
WHERE page.segment = first.segment
    AND page.offset >= first.offset AND page.offset < first.offset + ?
    AND page.namespace = ? AND length(page.key) = ?
"""
#: Among pages used in the same second those written last leave first: the end of a prefix.
ORDERS: Final = {
    "lru": "used, written DESC",
    "ttl": "used, written DESC",
    "lfu": "uses, used, written DESC",
}

#: 1 where what is said of a segment and of its pages does not agree, pages overlap, or a namespace
#: is unknown, as after a database was restored and the log of its changes was not. SQLite has no
#: checksums: it does not find a flipped bit in a number. Reads one index in its order.
DISAGREEMENT: Final = """
WITH RECURSIVE placed AS (
    SELECT segment, offset, bytes,
        lag(offset + bytes, 1, 0) OVER (PARTITION BY segment ORDER BY offset) AS free
    FROM pages
), found AS (
    SELECT segment, sum(bytes) AS live, max(offset + bytes) AS stop, max(offset < free) AS overlap
    FROM placed GROUP BY segment
), namespace_ids AS (
    SELECT min(namespace) AS id FROM pages
    UNION ALL SELECT (SELECT min(namespace) FROM pages WHERE namespace > id)
    FROM namespace_ids WHERE id IS NOT NULL
)
SELECT EXISTS (
    SELECT 1 FROM segments LEFT JOIN found ON id = segment
    WHERE segments.live != coalesce(found.live, 0) OR segments.bytes < coalesce(stop, 0) OR overlap
) OR EXISTS (
    SELECT 1 FROM found WHERE segment NOT IN (SELECT id FROM segments)
) OR EXISTS (
    SELECT 1 FROM namespace_ids WHERE id IS NOT NULL AND id NOT IN (SELECT id FROM namespaces)
)
"""

#: What SQLite says for a disk that is full or fails, and for a lock that another program holds.
_REFUSALS: Final = (
    "database is locked",
    "database or disk is full",
    "disk I/O error",
    "locking protocol",
    "unable to open database file",
)


def connect(file: Path | None) -> sqlite3.Connection:
    """Open a database for all threads; None: a new one in memory.

    It survives a loss of power, though not its last transactions.
    """
    database = sqlite3.connect(
        file or ":memory:", timeout=_WAIT_S, isolation_level=None, check_same_thread=False
    )
    try:
        database.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error:
        database.close()
        raise
    return database


def copy_database(source: Path, database: sqlite3.Connection) -> None:
    """Copy a database that cannot be written."""
    name = f"{source.as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(name, uri=True)) as found:
        found.backup(database)


@contextlib.contextmanager
def transaction(database: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """All changes inside, or none if an exception leaves the context; "DEFERRED" to read."""
    database.execute(f"BEGIN {kind}")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back by itself.
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def is_refusal(error: Exception) -> bool:
    """Whether SQLite cannot read for another reason than what a file contains."""
    return isinstance(error, sqlite3.OperationalError) and str(error) in _REFUSALS
