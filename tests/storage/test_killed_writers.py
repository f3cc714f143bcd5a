"""SIGKILL at chosen moments: what was acknowledged is there and whole, and the store goes on.

``test_random_faults.py`` kills at random times. Here a process ends at each step of a put, of a
collection and of the rebuilding of an index, where random times seldom hit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.storage import FileStore, folder
from hisparse.storage.index import Index
from hisparse.storage.segments import Segments, SegmentWriter
from tests.processes import die, run_killed
from tests.sizes import SWEEPS
from tests.storage.pages import NAMESPACE, contents, fill, key_of, read, segment_files

_BLOCK = 4096
_RECORD, _USED = 3 * _BLOCK, _BLOCK + NAMESPACE.page_bytes
#: Pages of two full segments and of one that is begun.
_SEGMENT, _COUNT = 4 * _RECORD, 10

Patch = Callable[[], None]


def _before(owner: Any, name: str, after: int = 0) -> Patch:
    """Die at a call of a method, or after it returned; ``after`` counts the calls before."""
    return _patched(owner, name, after, before=True)


def _behind(owner: Any, name: str, after: int = 0) -> Patch:
    return _patched(owner, name, after, before=False)


def _patched(owner: Any, name: str, after: int, *, before: bool) -> Patch:
    def patch() -> None:
        original, left = getattr(owner, name), [after]

        def dying(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if before and left[0] < 0:
                die()
            result = original(*args, **options)
            if left[0] < 0:
                die()
            return result

        setattr(owner, name, dying)

    return patch


def _before_commit() -> None:
    """Die with all changes of a transaction made, and none of them committed."""
    original = Index.transaction

    @contextlib.contextmanager
    def dying(self: Index) -> Iterator[Any]:
        with original(self) as database:
            yield database
            die()

    Index.transaction = dying  # type: ignore[method-assign]


def _half_written(num_bytes: int) -> Patch:
    """Die when the disk has so many bytes of a record."""

    def write(fd: int, views: list[memoryview], offset: int) -> int:
        os.pwrite(fd, b"".join(views)[:num_bytes], offset)
        die()

    def patch() -> None:
        os.pwritev = write  # type: ignore[assignment]

    return patch


def _open(path: Path) -> FileStore:
    return FileStore(path, 1 << 30, segment_bytes=_SEGMENT)


def _check(path: Path, keys: list[str], unsure: list[str]) -> None:
    """``keys`` are there, with the index and without, and others can be put behind them."""
    for turn in range(2):
        with _open(path) as store:
            assert all(read(store, keys)), f"turn {turn}: an acknowledged page is lost"
            read(store, unsure)
            fill(store, range(500 + 10 * turn, 505 + 10 * turn))
            keys = keys + [key_of(500 + 10 * turn + i) for i in range(5)]
            assert store.verify().damaged == ()
        (path / "index.sqlite").unlink()
    with _open(path) as store:
        assert all(read(store, keys))


@pytest.mark.parametrize(
    "patch",
    [
        *[pytest.param(_half_written(n), id=f"after {n} bytes") for n in (1, _BLOCK, _USED - 1)],
        pytest.param(_half_written(1 << 20), id="after the padding"),
        pytest.param(_before(Index, "add"), id="before the index"),
        pytest.param(_behind(Index, "_extend"), id="in the transaction"),
        pytest.param(_before_commit, id="before the commit"),
        pytest.param(_behind(Index, "add"), id="before the acknowledgement"),
        pytest.param(_before(SegmentWriter, "seal"), id="before a segment is sealed"),
        pytest.param(_behind(SegmentWriter, "_begin"), id="in an empty segment"),
    ],
)
@pytest.mark.parametrize("done", [0, 5] if SWEEPS else [5])
def test_a_writer(tmp_path: Path, patch: Patch, done: int) -> None:
    def put(acknowledge: Callable[[], None]) -> None:
        store = _open(tmp_path)
        for number in range(done + 10):
            if number == done:
                patch()
            if store.put(NAMESPACE, key_of(number), contents(key_of(number))):
                acknowledge()

    acknowledged = run_killed(put)
    assert done <= acknowledged < done + 10
    keys = [key_of(number) for number in range(acknowledged)]
    _check(tmp_path, keys, [key_of(acknowledged)])


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(_before(Index, "move"), id="copied, not moved"),
        pytest.param(_behind(Index, "move", after=2), id="some moved"),
        pytest.param(_before(Segments, "delete"), id="before a segment is deleted"),
        pytest.param(_behind(Segments, "delete"), id="a segment is deleted"),
        pytest.param(_behind(Index, "cut_segment"), id="a segment is forgotten"),
        pytest.param(_before(os, "fsync"), id="before the copies are on the disk"),
    ],
)
def test_a_collection(tmp_path: Path, patch: Patch) -> None:
    with _open(tmp_path) as store:
        keys = fill(store, range(_COUNT))
        store.remove(NAMESPACE, keys[::2])

    def collect(_: Callable[[], None]) -> None:
        store = _open(tmp_path)
        patch()
        store.collect(1.0)

    run_killed(collect)
    _check(tmp_path, keys[1::2], keys[::2])
    with _open(tmp_path) as store:
        store.collect(1.0)
        report = store.describe()
        assert report.segment_bytes == sum(x.stat().st_size for x in segment_files(tmp_path))
        assert report.live_bytes == report.pages * _RECORD


def test_an_eviction(tmp_path: Path) -> None:
    """Some of the pages that were to leave are gone, and the others are whole."""
    limits = {"size_bytes": 20 * _RECORD, "segment_bytes": 2 * _RECORD}
    with _open(tmp_path) as store:
        keys = fill(store, range(30))

    def evict(_: Callable[[], None]) -> None:
        store = FileStore(tmp_path, **limits)
        _before(Segments, "delete", after=2)()
        store.collect()

    run_killed(evict)
    with FileStore(tmp_path, **limits) as store:
        # One that a read begins in another thread would be at it when this one is to collect.
        store._collector.run_soon = lambda room: None  # type: ignore[method-assign]
        assert 0 < sum(read(store, keys)) < 30
        store.collect()
        assert store.verify().damaged == ()
        assert store.describe().segment_bytes <= 20 * _RECORD


def _in_an_empty_file() -> None:
    """Die when SQLite has made its file, without a table."""
    connect = sqlite3.connect

    def dying(name: Any, **options: Any) -> sqlite3.Connection:
        is_new = isinstance(name, Path) and not name.stat().st_size
        database = connect(name, **options)
        if is_new:
            database.execute("PRAGMA journal_mode = WAL")
            die()
        return database

    sqlite3.connect = dying  # type: ignore[assignment]


_REBUILDING = [
    pytest.param(_before(Path, "unlink"), id="before the old one is deleted"),
    pytest.param(_behind(Path, "unlink"), id="without a file"),
    pytest.param(_in_an_empty_file, id="in an empty file"),
    pytest.param(_before(Index, "recover"), id="without pages"),
    pytest.param(_behind(Index, "recover", after=1), id="with some pages"),
    pytest.param(_before(Index, "set_ready"), id="with all pages"),
]


def _rebuild(path: Path, patch: Patch) -> None:
    """A process that makes the index anew, three pages at a time, until it is killed."""

    def rebuild(_: Callable[[], None]) -> None:
        folder._BATCH = 3  # type: ignore[misc]
        patch()
        _open(path)

    run_killed(rebuild)


@pytest.mark.parametrize("patch", _REBUILDING)
def test_the_making_of_an_index(tmp_path: Path, patch: Patch) -> None:
    with _open(tmp_path) as store:
        keys = fill(store, range(_COUNT))
    os.truncate(tmp_path / "index.sqlite", 5000)
    _rebuild(tmp_path, patch)
    _check(tmp_path, keys, [])


@pytest.mark.parametrize("patch", _REBUILDING)
def test_one_that_waited_for_the_index_makes_it(
    tmp_path: Path, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process waits meanwhile; it may not take what the killed one left for the whole."""
    with _open(tmp_path) as store:
        keys = fill(store, range(_COUNT))
    os.truncate(tmp_path / "index.sqlite", 5000)
    flock, waited = fcntl.flock, []

    def wait(fd: int, operation: int) -> None:
        if waited or operation != fcntl.LOCK_EX | fcntl.LOCK_NB:
            flock(fd, operation)
            return
        # As if the other, which is killed while this process waits, had the lock.
        waited.append(fd)
        _rebuild(tmp_path, patch)
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", wait)
    with _open(tmp_path) as store:
        assert waited
        assert all(read(store, keys))
        keys += fill(store, range(500, 505))
    monkeypatch.undo()
    (tmp_path / "index.sqlite").unlink()
    with _open(tmp_path) as store:
        assert all(read(store, keys))


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another"])
def test_an_index_that_lacks_pages_costs_none(tmp_path: Path, alone: bool) -> None:
    """From a backup; a process that is not alone brings it up to date as well."""
    with _open(tmp_path) as store:
        keys = fill(store, range(3))
    shutil.copy(tmp_path / "index.sqlite", tmp_path / "yesterday")
    with _open(tmp_path) as store:
        keys += fill(store, range(3, 7))
    (tmp_path / "yesterday").replace(tmp_path / "index.sqlite")
    other = os.open(tmp_path / "open.lock", os.O_RDONLY)
    if not alone:
        fcntl.flock(other, fcntl.LOCK_SH)
    with _open(tmp_path) as store:
        assert not alone or store.find(NAMESPACE, keys) == 7
        keys += fill(store, range(7, 10))
    os.close(other)
    (tmp_path / "index.sqlite").unlink()
    with _open(tmp_path) as store:
        assert all(read(store, keys))
