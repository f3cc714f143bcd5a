"""What survives the manager: records by number, in SQLite, in Redis, or nowhere."""

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import parse_qs, urlencode

import psutil

from hisparse.errors import ConfigError, one_line

_LOG: Final = logging.getLogger(__name__)
#: Records by number; None deletes.
Changes = Mapping[int, bytes | None]

_REDIS_TIMEOUT_S: Final = 5.0
#: How long after its last word a manager keeps a Redis for itself.
_LEASE_S: Final = 6.0
_RENEW_S: Final = 2.0


class LostStoreError(OSError):
    """Another manager has the store now."""


class Store:
    """Records by number, which one manager at a time reads and writes. This one keeps nothing."""

    #: After so many seconds without a word another manager may have it; inf: never.
    lease_s: float = math.inf

    def acquire(self, name: str) -> str:
        """Get the store for a manager, unless another one has it.

        Args:
            name: of the manager.

        Returns:
            The name of who has it; it may be unknown: "".

        Raises:
            ConfigError: it cannot be opened.
        """
        return name

    def load(self) -> Iterator[tuple[int, bytes]]:
        """All records, in any order."""
        return iter(())

    def write(self, changes: Changes) -> None:
        """Make all changes or none; they survive the end of this process."""

    def renew(self) -> None:
        """Say that this manager still has it; called where nothing else is."""

    def close(self) -> None:
        """Give it up; :meth:`acquire` may get it again."""


class SQLiteStore(Store):
    """One file. A second one, ``<file>.leader``, is locked and has the name of who locked it.

    The system frees the lock when its process ends.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def acquire(self, name: str) -> str:
        lock = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(f"{self._path}.leader", "a+", opener=_private)  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                with lock:
                    return lock.read()
            self._db = self._open()
            lock.truncate(0)
            lock.write(name)
            lock.flush()
        except (sqlite3.Error, OSError) as error:
            if lock is not None:
                lock.close()
            text = f"store: got {self._path}, expected a file of managers"
            raise ConfigError(f"{text}: {one_line(error)}") from None
        self._lock: IO[str] = lock
        return name

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(self._path, timeout=1, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 10000")
        # Numbers grow, so that new records are appended.
        db.execute("CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, value BLOB)")
        return db

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
        self._lock.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class RedisStore(Store):
    """One hash in Redis or Valkey.

    Args:
        url: ``redis://[:password@]host:port[/db][?cluster_name=NAME]``; managers of each name have
            a store of their own.

    Raises:
        ConfigError: it is no such URL.
    """

    lease_s = _LEASE_S

    def __init__(self, url: str) -> None:
        import redis  # Needed here only.

        self._error: Any = redis.RedisError
        url, _, query = url.partition("?")
        options = parse_qs(query)
        cluster = options.pop("cluster_name", [""])[0]
        self._key = "hisparse:kvcm" + (f":{cluster}" if cluster else "")
        #: Who has the store, and how many there were: none came in between if it is the same.
        self._owner, self._epochs = f"{self._key}:owner", f"{self._key}:epoch"
        try:
            self._redis: Any = redis.Redis.from_url(
                f"{url}?{urlencode(options, doseq=True)}",
                socket_timeout=_REDIS_TIMEOUT_S,
                socket_connect_timeout=_REDIS_TIMEOUT_S,
            )
        except (redis.RedisError, ValueError) as error:
            raise self._refuse(error) from None
        self._name, self._epoch = "", 0
        self._writing = threading.Lock()  # Of two threads one would take the other for a manager.

    @staticmethod
    def _refuse(error: Exception) -> ConfigError:
        text = "store: expected redis://[:password@]host:port[/db] of a running server"
        return ConfigError(f"{text}: {one_line(error)}")

    def acquire(self, name: str) -> str:
        self._name = f"{name} {_place()}:{os.getpid()}"
        try:
            owner = self._redis.get(self._owner)
            if owner is None or _is_dead(owner.decode()):
                epoch = int(self._redis.get(self._epochs) or 0)
                with contextlib.suppress(LostStoreError):
                    self._write({}, owner, epoch, epoch + 1)
                    self._epoch = epoch + 1
                    return name
                owner = self._redis.get(self._owner)
            return str(owner.decode()).partition(" ")[0] if owner else ""
        except (self._error, OSError) as error:
            raise self._refuse(error) from None

    def load(self) -> Iterator[tuple[int, bytes]]:
        for number, value in self._redis.hscan_iter(self._key, count=10_000):
            yield int(number), value

    def write(self, changes: Changes) -> None:
        self._write(changes, self._name.encode(), self._epoch, self._epoch)

    def _write(self, changes: Changes, owner: bytes | None, epoch: int, new_epoch: int) -> None:
        """Write if the owner is still this one or gone, and none came since; be it from then on."""
        import redis

        kept = {number: value for number, value in changes.items() if value is not None}
        gone = [number for number, value in changes.items() if value is None]
        with self._writing, self._redis.pipeline(transaction=True) as pipeline:
            pipeline.watch(self._owner, self._epochs)
            found, others = pipeline.get(self._owner), pipeline.get(self._epochs)
            if found not in (None, owner) or int(others or 0) != epoch:
                name = "another" if found in (None, owner) else found.decode().partition(" ")[0]
                raise LostStoreError(f"the manager {name} has this store now")
            pipeline.multi()
            pipeline.set(self._epochs, new_epoch)
            pipeline.set(self._owner, self._name, px=int(self.lease_s * 1000))
            if kept:
                pipeline.hset(self._key, mapping=kept)
            if gone:
                pipeline.hdel(self._key, *gone)
            try:
                pipeline.execute()
            except redis.WatchError:
                raise LostStoreError("another manager has this store now") from None

    def renew(self) -> None:
        self.write({})

    def close(self) -> None:
        with contextlib.suppress(self._error):
            if self._redis.get(self._owner) == self._name.encode():
                self._redis.delete(self._owner)
        self._redis.close()


def _place() -> str:
    """Where process numbers mean the same: this machine since it started, and this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(8)  # Nobody's: leases alone tell who is gone.


def _is_dead(owner: str) -> bool:
    """Whether an owner was a process that would be seen here, and is gone."""
    place, _, pid = owner.partition(" ")[2].rpartition(":")
    return place == _place() and not psutil.pid_exists(int(pid))


def open_store(place: str) -> Store:
    """The store at a place: ``""`` for none, a URL of Redis, or a file.

    Raises:
        ConfigError: it is no place.
    """
    if not place:
        return Store()
    if place.startswith(("redis://", "rediss://")):
        return RedisStore(place)
    if "://" in place:
        raise ConfigError(f"store: got {place}, expected a file or redis://host:port")
    return SQLiteStore(Path(place))


class Writer:
    """Writes to a store in a thread of its own; changes that wait are written together.

    Args:
        store: acquired; used by this thread from now on.

    Attributes:
        lost: who has the store now; empty: this process.
    """

    def __init__(self, store: Store) -> None:
        self.lost = ""
        self._store = store
        self._end = time.monotonic() + store.lease_s
        self._waiting: queue.SimpleQueue[tuple[Changes, asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="kvcm-store", daemon=True)
        self._thread.start()

    @property
    def lease_left(self) -> float:
        """Seconds for which nobody else can have the store, at most those of a lease."""
        return 0.0 if self.lost else min(_LEASE_S, self._end - time.monotonic())

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
                if error := self._reach({}):  # The next write says so to its client.
                    _LOG.error("%s", error)
                continue
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            ends = None in batch
            asked = [item for item in batch if item is not None]
            changes: dict[int, bytes | None] = {}
            for each, _ in asked:
                changes.update(each)
            error = self._reach(changes) if changes else None
            for _, future in asked:
                future.get_loop().call_soon_threadsafe(_settle, future, error)

    def _reach(self, changes: Changes) -> OSError | None:
        """Write, or renew where there are no changes; the error, if any."""
        begin = time.monotonic()
        try:
            if changes:
                self._store.write(changes)
            else:
                self._store.renew()
        except LostStoreError as error:
            self.lost = str(error)
            return error
        except Exception as error:  # Redis and SQLite have exceptions of their own.
            return OSError(f"the store failed: {one_line(error)}")
        self._end = begin + self._store.lease_s
        return None


def _settle(future: asyncio.Future[None], error: OSError | None) -> None:
    if future.done():  # Its caller was cancelled.
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
