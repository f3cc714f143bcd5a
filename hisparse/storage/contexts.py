"""Contexts: sequences of pages with attributes, in an SQLite file of their own beside the index.

The index can be made again from the segments; attributes cannot. A store without this file has
the same pages, of no context.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.private_files import NotPrivateError, PrivateFolder
from hisparse.storage.namespace import Namespace

__all__ = ["Context", "Contexts", "Filter"]

#: ``attributes -> bool``: whether pages of a context with these attributes may be used.
Filter = Callable[[Mapping[str, Any]], bool]

#: Counted up when the tables change.
_VERSION: Final = 1
#: Seconds to wait for other processes.
_WAIT_S: Final = 10.0
#: A key names all pages before its own, so that one row says that a context begins with them.
_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS contexts (
    id INTEGER PRIMARY KEY, namespace BLOB NOT NULL, num_tokens INTEGER NOT NULL,
    attributes TEXT NOT NULL, created REAL NOT NULL, last BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS contexts_by_last ON contexts (last);
CREATE TABLE IF NOT EXISTS pages (
    key BLOB NOT NULL, context INTEGER NOT NULL, PRIMARY KEY (key, context)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pages_by_context ON pages (context);
PRAGMA user_version = {_VERSION};
COMMIT;
"""


@dataclass(frozen=True, kw_only=True)
class Context:
    """A sequence of tokens that somebody stored.

    Attributes:
        id: number of the context in its store.
        num_tokens: tokens whose pages were stored; some may have left the store since.
        attributes: what it was stored with.
        created: when it was stored, seconds since 1970.
    """

    id: int
    num_tokens: int
    attributes: Mapping[str, Any]
    created: float


class Contexts:
    """The contexts of one namespace. Methods may be called from any thread.

    Args:
        folder: the folder of the store.
        namespace: of the pages.

    Raises:
        HiSparseError: the file is damaged or of another version, cannot be opened, or others can
            write to it or to the folder.
    """

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        self._file, self._namespace = folder.absolute() / "contexts.sqlite", namespace
        self._lock = threading.RLock()
        try:
            private = PrivateFolder(folder.absolute(), or_roots=True)
            self._writable = not private.read_only
            private.check_database(self._file.name, create=self._writable)
        except OSError as error:
            reason = str(error) if isinstance(error, NotPrivateError) else one_line(error)
            raise HiSparseError(f"contexts {quoted(str(folder))}: {reason}") from None
        with self._named_errors():
            self._database = sqlite3.connect(
                self._file if self._writable else ":memory:",
                timeout=_WAIT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                if self._writable:
                    self._prepare()
                else:
                    self._copy()
                if (version := self._version()) != _VERSION:
                    raise HiSparseError(
                        f"{str(self._file)!r}: got contexts of version {version}, expected "
                        f"{_VERSION}"
                    )
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        """Make the tables if this is a new file."""
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        if not self._version():
            self._database.executescript(_SCHEMA)

    def _copy(self) -> None:
        """Copy a file that cannot be written, or begin without contexts."""
        if self._file.exists():
            name = f"{self._file.as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(name, uri=True)) as source:
                source.backup(self._database)
        else:
            self._database.executescript(_SCHEMA)
        self._database.execute("PRAGMA query_only = ON")

    def _version(self) -> int:
        return int(self._database.execute("PRAGMA user_version").fetchone()[0])

    def add(
        self, keys: Sequence[str], num_tokens: int, attributes: Mapping[str, Any]
    ) -> Context | None:
        """Add a context; one with the same pages and attributes is returned as it is.

        Args:
            keys: of its pages in order.
            num_tokens: tokens of these pages.
            attributes: a JSON object.

        Returns:
            The context; None without a page.

        Raises:
            ConfigError: ``attributes`` is no JSON object.
            HiSparseError: the file cannot be written.
        """
        text, raw = _attributes_text(attributes), [bytes.fromhex(key) for key in keys]
        if not raw:
            return None
        values = [self._namespace.key_bytes, num_tokens, text, time.time(), raw[-1]]
        with self._transaction() as database:
            rule = "last = ? AND attributes = ? AND namespace = ?"
            known = self._select(rule, [raw[-1], text, self._namespace.key_bytes])
            if known:
                return known[0]
            number = database.execute(
                "INSERT INTO contexts (namespace, num_tokens, attributes, created, last) "
                "VALUES (?, ?, ?, ?, ?)",
                values,
            ).lastrowid
            database.executemany("INSERT INTO pages VALUES (?, ?)", [(key, number) for key in raw])
            return self._select("id = ?", [number])[0]

    def all(self) -> list[Context]:
        """Every context, the oldest first."""
        return self._select("namespace = ? ORDER BY id", [self._namespace.key_bytes])

    def longest(self, keys: Sequence[str], accept: Filter) -> int:
        """Length of the longest prefix of ``keys`` with which an accepted context begins."""
        accepted: dict[int, bool] = {}

        def begins(key: str) -> bool:
            rows = self._read(
                "SELECT id, attributes FROM contexts JOIN pages ON context = id "
                "WHERE key = ? AND namespace = ?",
                [bytes.fromhex(key), self._namespace.key_bytes],
            )
            for number, text in rows:
                if number not in accepted:
                    accepted[number] = bool(accept(self._parse(text)))
                if accepted[number]:
                    return True
            return False

        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if begins(keys[middle - 1]) else (low, middle - 1)
        return low

    def remove(self, number: int) -> bool:
        """Remove a context; its pages stay. Returns whether it was there."""
        with self._transaction() as database:
            database.execute("DELETE FROM pages WHERE context = ?", [number])
            return bool(database.execute("DELETE FROM contexts WHERE id = ?", [number]).rowcount)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._database.close()

    def _select(self, rule: str, values: Sequence[object]) -> list[Context]:
        rows = self._read(
            f"SELECT id, num_tokens, attributes, created FROM contexts WHERE {rule}", values
        )
        return [
            Context(id=number, num_tokens=tokens, attributes=self._parse(text), created=created)
            for number, tokens, text, created in rows
        ]

    def _read(self, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._named_errors(), self._lock:
            return self._database.execute(statement, values).fetchall()

    def _parse(self, text: str) -> dict[str, Any]:
        with self._named_errors():
            attributes: dict[str, Any] = json.loads(text)
            return attributes

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All changes inside, or none if an exception leaves the context."""
        with self._named_errors(), self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back by itself.
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, json.JSONDecodeError) as error:
            raise HiSparseError(
                f"{str(self._file)!r}: {one_line(error)}; expected contexts of a store, or no such "
                "file: without it the store has the same pages, of no context"
            ) from None


def _attributes_text(attributes: Mapping[str, Any]) -> str:
    """Canonical JSON of attributes.

    Raises:
        ConfigError: they are no JSON object.
    """
    try:
        text = json.dumps(dict(attributes), sort_keys=True, allow_nan=False)
        if json.loads(text) == dict(attributes):
            return text
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"attributes: got {quoted(attributes)}, expected a JSON object such as "
        '{"tenant": "x", "year": 2026}'
    )
