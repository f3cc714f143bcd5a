"""Contexts: sequences of pages with attributes, in an SQLite file beside the pages.

A store without this file has the same pages, of no context.

Keys of pages are kept in a tree, so that a context takes space only for its new pages. A node is a
branch: a run of keys that follows a key of another branch. A new context appends its unknown keys
to a branch or makes a new one, and refers to the branch and its number of pages. A key depends on
all earlier pages, so it occurs once in the tree.
"""

import contextlib
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.private_files import NotPrivateError, PrivateFolder
from hisparse.storage.namespace import Namespace

#: Seconds to wait for other processes.
_WAIT_S: Final = 10.0
#: Counted up when the tables change.
_VERSION: Final = 3
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
    id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, num_tokens INTEGER NOT NULL,
    attributes TEXT NOT NULL, created REAL NOT NULL,
    branch INTEGER NOT NULL, num_pages INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS contexts_by_branch ON contexts (branch, num_pages);
PRAGMA user_version = {_VERSION};
COMMIT;
"""
#: Branches that the contexts of each namespace lead through. A branch is made after its parent.
_BRANCHES_IN_USE: Final = """
WITH RECURSIVE used (namespace, branch) AS (
    SELECT namespace, branch FROM contexts
    UNION SELECT namespace, parent FROM used JOIN branches ON id = branch
)
SELECT namespace, branch, parent, start FROM used JOIN branches ON id = branch ORDER BY branch
"""
#: What to do with another file.
_NO_FILE: Final = "or no such file: without it the store has the same pages, of no context"

#: ``attributes -> bool``: whether pages of a context with these attributes may be used.
Filter = Callable[[Mapping[str, Any]], bool]
#: ``key of a namespace, keys of pages -> which of the pages are stored``.
Stored = Callable[[str, Sequence[bytes]], list[bool]]


@dataclass(frozen=True, kw_only=True)
class Context:
    """A sequence of tokens that was stored.

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


def contexts_path(folder: Path) -> Path:
    """The file of contexts of the store in a folder."""
    return folder.absolute() / "contexts.sqlite"


class Contexts:
    """The contexts of one namespace. Methods may be called from any thread.

    Args:
        folder: the folder of the store.
        namespace: of the pages; None: of no namespace, to :meth:`forget_absent` those of all.

    Raises:
        HiSparseError: the file is damaged or of another version, cannot be opened, or others can
            write to it or to the folder.
    """

    def __init__(self, folder: Path, namespace: Namespace | None) -> None:
        self._path, self._lock = contexts_path(folder), threading.RLock()
        self._namespace = "" if namespace is None else namespace.key
        try:
            private = PrivateFolder(folder.absolute(), or_roots=True)
            private.check_database(self._path.name, create=not private.read_only)
        except NotPrivateError as error:
            raise HiSparseError(f"contexts {quoted(str(folder))}: {error}") from None
        except OSError as error:
            text = f"got {one_line(error)}, expected the folder of a store"
            raise HiSparseError(f"contexts {quoted(str(folder))}: {text}") from None
        with self._named_errors(), contextlib.ExitStack() as stack:
            self._database = self._connect(private.read_only)
            stack.callback(self._database.close)
            if private.read_only:
                self._database.execute("PRAGMA query_only = ON")
            elif not self._version():
                self._database.execute("PRAGMA auto_vacuum = FULL")
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.executescript(_SCHEMA)
            if (version := self._version()) != _VERSION:
                raise HiSparseError(
                    f"{str(self._path)!r}: got contexts of version {version}, expected "
                    f"{_VERSION}, {_NO_FILE}"
                )
            stack.pop_all()

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        """Open the file, for all threads; if this user cannot write to it, a copy in memory."""
        # It survives a loss of power, though not its last transactions.
        database = sqlite3.connect(
            ":memory:" if read_only else self._path,
            timeout=_WAIT_S, isolation_level=None, check_same_thread=False,
        )  # fmt: skip
        database.execute("PRAGMA synchronous = NORMAL")
        if read_only and self._path.exists():
            # SQLite cannot lock it, and another user may write to it later.
            name = f"{self._path.as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(name, uri=True)) as found:
                found.backup(database)
        elif read_only:
            database.executescript(_SCHEMA)
        return database

    def _version(self) -> int:
        return int(self._database.execute("PRAGMA user_version").fetchone()[0])

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._database.close()

    def add(
        self, keys: Sequence[str], num_tokens: int, attributes: Mapping[str, Any]
    ) -> Context | None:
        """Add a context; one with the same pages and attributes is returned as it is.

        Args:
            keys: of its pages in order, as :func:`page_keys` makes them.
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
        with self._transaction():
            end = [self._extend(raw), len(raw)]
            rule = "branch = ? AND num_pages = ? AND attributes = ? AND namespace = ?"
            known = self._select(rule, [*end, text, self._namespace])
            if known:
                return known[0]
            number = self._database.execute(
                "INSERT INTO contexts (namespace, num_tokens, attributes, created, branch, "
                "num_pages) VALUES (?, ?, ?, ?, ?, ?)",
                [self._namespace, num_tokens, text, time.time(), *end],
            ).lastrowid
            return self._select("id = ?", [number])[0]

    def all(self) -> list[Context]:
        """Every context, the oldest first."""
        return self._select("namespace = ? ORDER BY id", [self._namespace])

    def longest(self, keys: Sequence[str], accept: Filter) -> int:
        """Length of the longest prefix of ``keys`` with which an accepted context begins."""
        if not (path := self._follow([bytes.fromhex(key) for key in keys])):
            return 0
        # Pages that all contexts in a branch share with ``keys``, as far as they go. A branch is
        # made after its parent.
        shared: dict[int, int] = {}
        for branch, parent, start in self._read(
            "SELECT id, parent, start FROM branches ORDER BY id"
        ):
            shared[branch] = path.get(branch, min(start, shared.get(parent, 0)))
        rows = self._read(
            "SELECT branch, num_pages, attributes FROM contexts WHERE namespace = ? ORDER BY id",
            [self._namespace],
        )
        found: list[tuple[int, str]] = [
            (min(pages, shared.get(branch, 0)), text) for branch, pages, text in rows
        ]
        for length, text in sorted(found, key=lambda x: x[0], reverse=True):
            if not length or accept(self._parse(text)):
                return length
        return 0

    def remove(self, number: int) -> bool:
        """Remove a context; its pages stay. Returns whether it was there."""
        with self._transaction():
            return self._remove(number)

    def forget_absent(self, stored: Stored) -> None:
        """Remove the contexts, of all namespaces, of which no page is stored."""
        with self._transaction("DEFERRED"):
            if not self._absent(stored):
                return
        with self._transaction():
            # Once more: a context may have been stored again meanwhile.
            for number in self._absent(stored):
                self._remove(number)

    def _absent(self, stored: Stored) -> list[int]:
        """Numbers of the contexts of which no page is stored."""
        #: Pages of a prefix that ends with the first page that is stored, by namespace and branch.
        first: dict[tuple[str, int], float] = {}
        for namespace, branch, parent, start in self._read(_BRANCHES_IN_USE):
            found = first.get((namespace, parent), math.inf)
            if found > start:
                found = start + self._first_of(branch, partial(stored, namespace))
            first[namespace, branch] = found
        rows = self._read("SELECT id, namespace, branch, num_pages FROM contexts")
        return [x for x, *place, pages in rows if first.get(tuple(place), math.inf) > pages]

    def _first_of(self, branch: int, stored: Callable[[Sequence[bytes]], list[bool]]) -> float:
        """Keys of a branch up to the first that is stored; infinite if none is."""
        ((first, blob),) = self._read("SELECT first, keys FROM branches WHERE id = ?", [branch])
        if stored([first]) == [True]:  # The first page of a prefix is the last to leave.
            return 1
        keys = _split(blob, len(first))
        for start in range(1, len(keys), _BATCH):
            if True in (found := stored(keys[start : start + _BATCH])):
                return start + found.index(True) + 1
        return math.inf

    def _follow(self, keys: Sequence[bytes]) -> dict[int, int]:
        """The branches that keys lead through, in order, and how many of the keys each ends."""
        path: dict[int, int] = {}
        length = 0
        while length < len(keys):
            statement = "SELECT id, keys FROM branches WHERE first = ?"
            if not (rows := self._read(statement, [keys[length]])):
                break
            branch = _split(rows[0][1], len(keys[length]))
            pairs = zip(branch, keys[length:], strict=False)
            length += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            path[rows[0][0]] = length
        return path

    def _extend(self, keys: Sequence[bytes]) -> int:
        """The branch in which keys end; it is made if need be. Inside of a transaction."""
        path = self._follow(keys)
        parent, known = next(reversed(path.items())) if path else (None, 0)
        more, run = b"".join(keys[known:]), self._database.execute
        if parent is not None and not more:
            return parent
        # So a conversation that grows stays one branch.
        longer = run(
            "UPDATE branches SET keys = CAST(keys || ? AS BLOB) "
            "WHERE id = ? AND start + length(keys) / length(first) = ?",
            [more, parent, known],
        )
        if parent is not None and longer.rowcount:
            return parent
        made = run(
            "INSERT INTO branches (parent, start, first, keys) VALUES (?, ?, ?, ?)",
            [parent, known, keys[known], more],
        )
        return int(made.lastrowid or 0)

    def _remove(self, number: int) -> bool:
        """Remove a context, and keys that no other has. Inside of a transaction."""
        found = self._read("SELECT branch FROM contexts WHERE id = ?", [number])
        self._database.execute("DELETE FROM contexts WHERE id = ?", [number])
        branch = found[0][0] if found else None
        while branch is not None:
            ((parent, start, needed),) = self._read(
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

    def _select(self, rule: str, values: Sequence[object]) -> list[Context]:
        rows = self._read(
            f"SELECT id, num_tokens, attributes, created FROM contexts WHERE {rule}", values
        )
        return [
            Context(id=number, num_tokens=tokens, attributes=self._parse(text), created=created)
            for number, tokens, text, created in rows
        ]

    def _parse(self, text: str) -> dict[str, Any]:
        with self._named_errors():
            attributes: dict[str, Any] = json.loads(text)
            return attributes

    def _read(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._named_errors(), self._lock:
            return self._database.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """All changes inside, or none if an exception leaves the context; "DEFERRED" to read."""
        with self._named_errors(), self._lock:
            self._database.execute(f"BEGIN {kind}")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back by itself.
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Errors of SQLite and of JSON become ours, with the file."""
        try:
            yield
        except (sqlite3.Error, json.JSONDecodeError) as error:
            raise HiSparseError(
                f"{str(self._path)!r}: {one_line(error)}; expected contexts of a store, {_NO_FILE}"
            ) from None


def _split(keys: bytes, width: int) -> list[bytes]:
    """The keys that lie one after the other, ``width`` bytes each."""
    return [keys[i : i + width] for i in range(0, len(keys), width)]


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
