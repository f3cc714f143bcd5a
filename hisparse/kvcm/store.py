"""What survives the manager: records by number, in SQLite, in Redis, or nowhere."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from hisparse.errors import ConfigError, one_line

#: Records by number; None deletes.
Changes = Mapping[int, bytes | None]

_REDIS_KEY: Final = "hisparse:kvcm"
_REDIS_TIMEOUT_S: Final = 5.0


class Store(Protocol):
    """Records by number. One thread at a time uses it."""

    def load(self) -> Iterator[tuple[int, bytes]]:
        """All records, in any order."""

    def write(self, changes: Changes) -> None:
        """Make all changes or none; they survive the end of this process."""

    def close(self) -> None:
        """Let go of the files or the connection."""


class NoStore:
    """Keeps nothing."""

    def load(self) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def write(self, changes: Changes) -> None:
        pass

    def close(self) -> None:
        pass


class SQLiteStore:
    """One file.

    Args:
        path: of the file, which one process may have open.

    Raises:
        ConfigError: the file cannot be opened, or another process has it.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=1, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint = 10000")
            # Numbers grow, so that new records are appended.
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, value BLOB)"
            )
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            text = f"store: got {path}, expected a file of a manager that is not running"
            raise ConfigError(f"{text}: {one_line(error)}") from None

    def load(self) -> Iterator[tuple[int, bytes]]:
        yield from self._db.execute("SELECT number, value FROM records ORDER BY number")

    def write(self, changes: Changes) -> None:
        gone = [(number,) for number, value in changes.items() if value is None]
        kept = [change for change in changes.items() if change[1] is not None]
        self._db.execute("BEGIN")
        try:
            self._db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", kept)
            self._db.executemany("DELETE FROM records WHERE number = ?", gone)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()


class RedisStore:
    """One hash in Redis or Valkey.

    Args:
        url: ``redis://[:password@]host:port[/db]``.

    Raises:
        ConfigError: nothing answers there.
    """

    def __init__(self, url: str) -> None:
        import redis  # Needed here only.

        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
            )
            self._redis.ping()
        except (redis.RedisError, ValueError, OSError) as error:
            text = "store: expected redis://[:password@]host:port[/db] of a running server"
            raise ConfigError(f"{text}: {one_line(error)}") from None

    def load(self) -> Iterator[tuple[int, bytes]]:
        for number, value in self._redis.hscan_iter(_REDIS_KEY, count=10_000):
            yield int(number), value

    def write(self, changes: Changes) -> None:
        kept = {number: value for number, value in changes.items() if value is not None}
        gone = [number for number, value in changes.items() if value is None]
        with self._redis.pipeline(transaction=True) as pipeline:
            if kept:
                pipeline.hset(_REDIS_KEY, mapping=kept)
            if gone:
                pipeline.hdel(_REDIS_KEY, *gone)
            pipeline.execute()

    def close(self) -> None:
        self._redis.close()


def open_store(place: str) -> Store:
    """The store at a place: ``""`` for none, a URL of Redis, or a file.

    Raises:
        ConfigError: it cannot be opened.
    """
    if not place:
        return NoStore()
    if place.startswith(("redis://", "rediss://")):
        return RedisStore(place)
    if "://" in place:
        raise ConfigError(f"store: got {place}, expected a file or redis://host:port")
    return SQLiteStore(Path(place))


class Writer:
    """Writes to a store in a thread of its own; changes that wait are written together.

    Args:
        store: used by this thread from now on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: queue.SimpleQueue[tuple[Changes, asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="kvcm-store", daemon=True)
        self._thread.start()

    async def write(self, changes: Changes) -> None:
        """Return when the changes are in the store. They are ordered as these calls are.

        Raises:
            OSError: they may not be there.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put((changes, future))
        await future

    def close(self) -> None:
        """Write what waits, then close the store."""
        self._waiting.put(None)
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        ends = False
        while not ends:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            ends = None in batch
            asked = [item for item in batch if item is not None]
            changes: dict[int, bytes | None] = {}
            for each, _ in asked:
                changes.update(each)
            error = None
            try:
                if changes:
                    self._store.write(changes)
            except Exception as raised:  # Redis and SQLite have exceptions of their own.
                error = OSError(f"the store failed: {one_line(raised)}")
            for _, future in asked:
                future.get_loop().call_soon_threadsafe(_settle, future, error)


def _settle(future: asyncio.Future[None], error: OSError | None) -> None:
    if future.done():  # Its caller was cancelled.
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
