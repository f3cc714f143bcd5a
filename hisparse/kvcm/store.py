"""What survives the manager: records by number, in SQLite, in Redis, or nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from hisparse.errors import ConfigError, one_line

_LOG: Final = logging.getLogger(__name__)
#: Records by number; None deletes.
Changes = Mapping[int, bytes | None]

_REDIS_KEY: Final = "hisparse:kvcm"
_REDIS_TIMEOUT_S: Final = 5.0
#: Who writes to Redis, and for how long after its last word nobody else may.
_REDIS_OWNER: Final = "hisparse:kvcm:owner"
_LEASE_S: Final = 6.0
#: How many owners there were: none came in between if it is the same.
_REDIS_EPOCH: Final = "hisparse:kvcm:epoch"
_RENEW_S: Final = 2.0


class LostStoreError(OSError):
    """Another manager has the store now."""


class Store(Protocol):
    """Records by number. One thread at a time uses it."""

    def load(self) -> Iterator[tuple[int, bytes]]:
        """All records, in any order."""

    def write(self, changes: Changes) -> None:
        """Make all changes or none; they survive the end of this process."""

    def renew(self) -> None:
        """Say that this process still uses it; called where nothing else is."""

    def close(self) -> None:
        """Let go of the files or the connection."""


class NoStore:
    """Keeps nothing."""

    def load(self) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def write(self, changes: Changes) -> None:
        pass

    def renew(self) -> None:
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
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
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

    def renew(self) -> None:
        pass

    def close(self) -> None:
        self._db.close()


class RedisStore:
    """One hash in Redis or Valkey, which one process writes.

    Args:
        url: ``redis://[:password@]host:port[/db]``.

    Raises:
        ConfigError: nothing answers there, or another process writes there.
    """

    def __init__(self, url: str) -> None:
        import redis  # Needed here only.

        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
            )
            self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
            self._epoch = 0
            owner = self._acquire()
        except (redis.RedisError, ValueError, OSError) as error:
            text = "store: expected redis://[:password@]host:port[/db] of a running server"
            raise ConfigError(f"{text}: {one_line(error)}") from None
        if owner is not None:
            text = f"got one of the manager {owner}, expected one of no running manager"
            raise ConfigError(f"store: {text}")

    def _acquire(self) -> str | None:
        """Become the owner, or return who is it and stays it. An owner that died is none."""
        end = time.monotonic() + _LEASE_S + 1
        while True:
            owner = self._redis.get(_REDIS_OWNER)
            if owner is None or _is_dead(owner.decode()):
                with contextlib.suppress(OSError):
                    epoch = int(self._redis.get(_REDIS_EPOCH) or 0)
                    self._write({}, owner, epoch, epoch + 1)
                    self._epoch = epoch + 1
                    return None
            elif time.monotonic() > end:
                return str(owner.decode())
            time.sleep(0.1)

    def load(self) -> Iterator[tuple[int, bytes]]:
        for number, value in self._redis.hscan_iter(_REDIS_KEY, count=10_000):
            yield int(number), value

    def write(self, changes: Changes) -> None:
        self._write(changes, self._name.encode(), self._epoch, self._epoch)

    def _write(self, changes: Changes, owner: bytes | None, epoch: int, new_epoch: int) -> None:
        """Write if the owner is still this one or gone, and none came since; be it from then on."""
        import redis

        kept = {number: value for number, value in changes.items() if value is not None}
        gone = [number for number, value in changes.items() if value is None]
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.watch(_REDIS_OWNER, _REDIS_EPOCH)
            found, others = pipeline.get(_REDIS_OWNER), pipeline.get(_REDIS_EPOCH)
            if found not in (None, owner) or int(others or 0) != epoch:
                name = "another" if found in (None, owner) else found.decode()
                raise LostStoreError(f"the manager {name} has this store now")
            pipeline.multi()
            pipeline.set(_REDIS_EPOCH, new_epoch)
            pipeline.set(_REDIS_OWNER, self._name, px=int(_LEASE_S * 1000))
            if kept:
                pipeline.hset(_REDIS_KEY, mapping=kept)
            if gone:
                pipeline.hdel(_REDIS_KEY, *gone)
            try:
                pipeline.execute()
            except redis.WatchError:
                raise LostStoreError("another manager has this store now") from None

    def renew(self) -> None:
        self.write({})

    def close(self) -> None:
        if self._redis.get(_REDIS_OWNER) == self._name.encode():
            self._redis.delete(_REDIS_OWNER)
        self._redis.close()


def _is_dead(owner: str) -> bool:
    """Whether an owner was a process of this host that is gone.

    One with this process's number may live in another container: its lease tells.
    """
    host, pid, _ = owner.rsplit(":", 2)
    return host == socket.gethostname() and not psutil.pid_exists(int(pid))


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

    Attributes:
        lost: who has the store now; empty: this process.
    """

    def __init__(self, store: Store) -> None:
        self.lost = ""
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
            try:
                batch = [self._waiting.get(timeout=_RENEW_S)]
            except queue.Empty:
                self._renew()
                continue
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            ends = None in batch
            asked = [item for item in batch if item is not None]
            changes: dict[int, bytes | None] = {}
            for each, _ in asked:
                changes.update(each)
            error: OSError | None = None
            try:
                if changes:
                    self._store.write(changes)
            except LostStoreError as raised:
                error, self.lost = raised, str(raised)
            except Exception as raised:  # Redis and SQLite have exceptions of their own.
                error = OSError(f"the store failed: {one_line(raised)}")
            for _, future in asked:
                future.get_loop().call_soon_threadsafe(_settle, future, error)

    def _renew(self) -> None:
        try:
            self._store.renew()
        except LostStoreError as error:
            self.lost = str(error)
        except Exception as error:  # The next write says so to its client.
            _LOG.error("store: %s", one_line(error))


def _settle(future: asyncio.Future[None], error: OSError | None) -> None:
    if future.done():  # Its caller was cancelled.
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
