"""The file of contexts: a tree of keys that grows with the pages that are new, and attributes.

The nodes are branches: runs of keys that follow a key of another branch. A context adds the keys
that no context before has, at the end of a branch or as a new one, and names the branch and how
many pages end there. A key names all pages before its own, so each has one place in the tree.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from hisparse.errors import HiSparseError, one_line, quoted
from hisparse.private_files import NotPrivateError, PrivateFolder
from hisparse.storage.schema import transaction

#: Counted up when the tables change.
_VERSION: Final = 2
#: Seconds to wait for other processes.
_WAIT_S: Final = 10.0
#: Keys that are looked up in the store at once.
_BATCH: Final = 500
#: ``start``: pages before the branch. ``keys``: its keys, one after the other, of equal lengths.
#: ``num_pages``: of a context.
_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS branches (
    id INTEGER PRIMARY KEY, parent INTEGER, start INTEGER NOT NULL, first BLOB NOT NULL UNIQUE,
    keys BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS branches_by_parent ON branches (parent);
CREATE TABLE IF NOT EXISTS contexts (
    id INTEGER PRIMARY KEY, namespace BLOB NOT NULL, num_tokens INTEGER NOT NULL,
    attributes TEXT NOT NULL, created REAL NOT NULL,
    branch INTEGER NOT NULL, num_pages INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS contexts_by_branch ON contexts (branch, num_pages);
PRAGMA user_version = {_VERSION};
COMMIT;
"""


#: What to do with another file.
_NO_FILE: Final = "or no such file: without it the store has the same pages, of no context"

#: ``key of a namespace, keys of pages -> which of the pages are stored``.
Stored = Callable[[bytes, Sequence[bytes]], list[bool]]


def contexts_path(folder: Path) -> Path:
    """The file of contexts of the store in a folder."""
    return folder.absolute() / "contexts.sqlite"


class ContextTree:
    """The file of contexts of a store, of all namespaces. Methods may be called from any thread.

    Args:
        folder: of the store.

    Raises:
        HiSparseError: the file is damaged or of another version, cannot be opened, or others can
            write to it or to the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = contexts_path(folder)
        self._lock = threading.RLock()
        try:
            private = PrivateFolder(folder.absolute(), or_roots=True)
            self._writable = not private.read_only
            private.check_database(self.path.name, create=self._writable)
        except OSError as error:
            reason = str(error) if isinstance(error, NotPrivateError) else one_line(error)
            raise HiSparseError(f"contexts {quoted(str(folder))}: {reason}") from None
        with self.named_errors():
            self._database = sqlite3.connect(
                self.path if self._writable else ":memory:",
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
                        f"{str(self.path)!r}: got contexts of version {version}, expected "
                        f"{_VERSION}, {_NO_FILE}"
                    )
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        """Make the tables if this is a new file."""
        if not self._version():
            self._database.execute("PRAGMA auto_vacuum = FULL")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        if not self._version():
            self._database.executescript(_SCHEMA)

    def _copy(self) -> None:
        """Copy a file that cannot be written, or begin without contexts."""
        if self.path.exists():
            name = f"{self.path.as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(name, uri=True)) as source:
                source.backup(self._database)
        else:
            self._database.executescript(_SCHEMA)
        self._database.execute("PRAGMA query_only = ON")

    def _version(self) -> int:
        return int(self._database.execute("PRAGMA user_version").fetchone()[0])

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._database.close()

    def read(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows that a statement gives."""
        with self.named_errors(), self._lock:
            return self._database.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """All changes inside, or none if an exception leaves the context; "DEFERRED" to read."""
        with self.named_errors(), self._lock, transaction(self._database, kind):
            yield self._database

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Errors of SQLite and of JSON become ours, with the file."""
        try:
            yield
        except (sqlite3.Error, json.JSONDecodeError) as error:
            raise HiSparseError(
                f"{str(self.path)!r}: {one_line(error)}; expected contexts of a store, {_NO_FILE}"
            ) from None

    def follow(self, keys: Sequence[bytes]) -> dict[int, int]:
        """The branches that keys lead through, in order, and how many of the keys each ends."""
        path: dict[int, int] = {}
        length = 0
        while length < len(keys):
            statement = "SELECT id, keys FROM branches WHERE first = ?"
            if not (rows := self.read(statement, [keys[length]])):
                break
            branch = _split(rows[0][1], len(keys[length]))
            pairs = zip(branch, keys[length:], strict=False)
            length += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            path[rows[0][0]] = length
        return path

    def extend(self, keys: Sequence[bytes]) -> int:
        """The branch in which keys end; it is made if need be. Inside of a transaction."""
        path = self.follow(keys)
        parent, known = next(reversed(path.items())) if path else (None, 0)
        more = b"".join(keys[known:])
        if parent is not None and not more:
            return parent
        if parent is not None:
            statement = "SELECT start, keys FROM branches WHERE id = ?"
            ((start, blob),) = self.read(statement, [parent])
            if start * len(keys[0]) + len(blob) == known * len(keys[0]):
                # So a conversation that grows stays one branch.
                values = [blob + more, parent]
                self._database.execute("UPDATE branches SET keys = ? WHERE id = ?", values)
                return parent
        values = [parent, known, keys[known], more]
        self._database.execute(
            "INSERT INTO branches (parent, start, first, keys) VALUES (?, ?, ?, ?)", values
        )
        return int(self.read("SELECT last_insert_rowid()")[0][0])

    def remove(self, number: int) -> bool:
        """Remove a context, and keys that no other has. Inside of a transaction."""
        found = self.read("SELECT branch FROM contexts WHERE id = ?", [number])
        self._database.execute("DELETE FROM contexts WHERE id = ?", [number])
        branch = found[0][0] if found else None
        while branch is not None:
            ((parent, start, needed),) = self.read(
                "SELECT parent, start, max("
                "coalesce((SELECT max(num_pages) FROM contexts WHERE branch = here.id), 0), "
                "coalesce((SELECT max(start) FROM branches WHERE parent = here.id), 0)) "
                "FROM branches AS here WHERE id = ?",
                [branch],
            )
            if needed > start:
                self._database.execute(
                    "UPDATE branches SET keys = substr(keys, 1, ? * length(first)) WHERE id = ?",
                    [needed - start, branch],
                )
                break
            self._database.execute("DELETE FROM branches WHERE id = ?", [branch])
            branch = parent
        return bool(found)

    def forget_absent(self, stored: Stored) -> int:
        """Remove the contexts of which no page is stored.

        Args:
            stored: says which pages are, by the key of their namespace and their own keys.

        Returns:
            The number of contexts.
        """
        with self.transaction("DEFERRED"):
            if not self._absent(stored):
                return 0
        with self.transaction():
            # Once more: a context may have been stored again meanwhile.
            absent = self._absent(stored)
            for number in absent:
                self.remove(number)
        return len(absent)

    def _absent(self, stored: Stored) -> list[int]:
        """Numbers of the contexts of which no page is stored."""
        places = {x: rest for x, *rest in self.read("SELECT id, parent, start FROM branches")}
        #: Pages of a prefix that ends with the first page that is stored, by namespace and branch.
        first: dict[tuple[bytes, int], float] = {}

        def first_stored(namespace: bytes, branch: int | None) -> float:
            climbed: list[int] = []
            while branch is not None and (namespace, branch) not in first:
                climbed.append(branch)
                branch = places[branch][0]
            found = math.inf if branch is None else first[namespace, branch]
            for each in reversed(climbed):
                start: int = places[each][1]
                if found > start:
                    found = start + self._first_of(each, lambda keys: stored(namespace, keys))
                first[namespace, each] = found
            return found

        rows = self.read("SELECT id, namespace, branch, num_pages FROM contexts")
        return [number for number, *place, pages in rows if first_stored(*place) > pages]

    def _first_of(self, branch: int, stored: Callable[[Sequence[bytes]], list[bool]]) -> float:
        """Keys of a branch up to the first that is stored; infinite if none is."""
        ((first, blob),) = self.read("SELECT first, keys FROM branches WHERE id = ?", [branch])
        if stored([first]) == [True]:  # The first page of a prefix is the last to leave.
            return 1
        keys = _split(blob, len(first))
        for start in range(1, len(keys), _BATCH):
            if True in (found := stored(keys[start : start + _BATCH])):
                return start + found.index(True) + 1
        return math.inf


def _split(keys: bytes, width: int) -> list[bytes]:
    """The keys that lie one after the other, ``width`` bytes each."""
    return [keys[i : i + width] for i in range(0, len(keys), width)]
