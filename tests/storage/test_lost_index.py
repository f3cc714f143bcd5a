"""An index that is lost, half made or from a backup, while several processes use the store."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import HiSparseError
from hisparse.storage import FileStore, folder, index, size_in_bytes
from hisparse.storage.folder import Folder
from hisparse.storage.index import Index
from hisparse.storage.segments import Segments
from tests.processes import largest_file
from tests.storage.pages import NAMESPACE, contents, fill, key_of, read, segment_files

_RECORD = 3 * 4096


def _open(path: Path) -> FileStore:
    store = FileStore(path, 1 << 30, segment_bytes=4 * _RECORD)
    store._collector.run_soon = lambda room: None  # type: ignore[method-assign]
    return store


@pytest.mark.parametrize("disk_kib", [0, 33, 40, 60])
def test_one_that_finds_the_disk_full_makes_half_an_index(
    tmp_path: Path, disk_kib: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one makes the other half, beside it, and deletes no segment that it did not read."""
    monkeypatch.setattr(folder, "_BATCH", 3)
    with _open(tmp_path) as store:
        keys = fill(store, range(40))
    (tmp_path / "index.sqlite").unlink()
    with largest_file(disk_kib << 10):
        first = _open(tmp_path)
    assert f"store {tmp_path} takes nothing: " in caplog.text
    with first, _open(tmp_path) as second:
        assert all(read(first, keys)) and all(read(second, keys))
        assert not first.put(NAMESPACE, key_of(99), contents(key_of(99)))
        second.collect(1.0)
        keys += fill(second, range(100, 105))
    with _open(tmp_path) as store:
        assert all(read(store, keys))


@pytest.mark.parametrize("disk_kib", [0, 33])
def test_a_full_disk_is_no_damage_of_the_index(
    tmp_path: Path, disk_kib: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The index stays, and with it what only the index knows: which pages were removed."""
    with _open(tmp_path) as store:
        keys = fill(store, range(10))
        store.remove(NAMESPACE, keys[5:])
    with largest_file(disk_kib << 10), _open(tmp_path) as store:
        assert read(store, keys) == [True] * 5 + [False] * 5
    with _open(tmp_path) as store:
        assert read(store, keys) == [True] * 5 + [False] * 5
    assert "damaged" not in caplog.text


def test_an_empty_index_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        _open(tmp_path).close()
    assert not caplog.messages


def _backup(path: Path) -> Path:
    return Path(shutil.copy(path / "index.sqlite", path.parent / f"{path.name}.backup"))


@pytest.mark.parametrize("log", ["old log", "no log"])
def test_a_backup_is_restored_while_the_store_is_open(tmp_path: Path, log: str) -> None:
    """No segment is deleted for what an old index says, by a process that began before or after."""
    path = tmp_path / "store"
    with _open(path) as store:
        keys = fill(store, range(10))
    backup = _backup(path)
    with _open(path) as first:
        keys += fill(first, range(10, 41))
        backup.replace(path / "index.sqlite")
        for suffix in ("-wal", "-shm") if log == "no log" else ():
            (path / f"index.sqlite{suffix}").unlink()
        with _open(path) as second:
            second.collect(1.0)
            keys += fill(second, range(50, 55))
            # Of the first, what it is writing is not known yet.
            assert sum(read(second, keys)) >= 40
            with pytest.raises(HiSparseError, match="index was deleted or replaced"):
                first.collect(1.0)
        assert not first.put(NAMESPACE, key_of(99), contents(key_of(99)))
        assert first.counters["refused_read_only"] == 1
    with _open(path) as store:
        store.collect(1.0)
        assert all(read(store, keys))


@pytest.mark.parametrize("size", [_RECORD, _RECORD + 1, 2 * _RECORD - 1])
def test_a_backup_that_knows_pages_at_the_places_of_others(tmp_path: Path, size: int) -> None:
    """A loss of power took the end of a file; what was put afterwards is not where that was."""
    path = tmp_path / "store"
    with _open(path) as store:
        keys = fill(store, range(3))
    backup, (file,) = _backup(path), segment_files(path)
    os.truncate(file, size)
    _open(path).close()
    with _open(path) as store:
        assert read(store, keys) == [True, False, False]
        later = fill(store, range(10, 15))
    backup.replace(path / "index.sqlite")
    with _open(path) as store:
        assert all(read(store, [keys[0], *later]))
        store.collect(1.0)
        assert all(read(store, [keys[0], *later]))


def test_the_index_is_lost_while_a_collection_deletes_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody makes it anew from a file that is about to go, and its copies count."""
    with _open(tmp_path) as store:
        keys = fill(store, range(4))
        store.remove(NAMESPACE, keys[:1])
    delete, others = Segments.delete, []

    def slowly(self: Segments, segment: int) -> None:
        monkeypatch.undo()
        (tmp_path / "index.sqlite").unlink()
        assert not first.put(NAMESPACE, key_of(99), contents(key_of(99)))
        others.append(_open(tmp_path))
        delete(self, segment)

    with _open(tmp_path) as first:
        monkeypatch.setattr(Segments, "delete", slowly)
        first.collect(1.0)
        with others[0] as second:
            second.collect(1.0)
    with _open(tmp_path) as store:
        store.collect(1.0)
        assert all(read(store, keys[1:]))


def test_a_segment_is_renamed_during_a_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _open(tmp_path) as store:
        keys = fill(store, range(4))
    (file,), read_on = segment_files(tmp_path), Folder.read_on

    def then_renamed(self: Folder, index: Index) -> bool:
        is_whole = read_on(self, index)
        if file.exists():
            file.rename(file.with_name("0" * 15 + "1.seg"))
        return is_whole

    with _open(tmp_path) as store:
        monkeypatch.setattr(Folder, "read_on", then_renamed)
        for _ in range(2):
            store.collect(1.0)
        assert all(read(store, keys))


def test_what_a_process_put_before_it_lost_the_index(tmp_path: Path) -> None:
    """Another reads it once the first has noticed, though the first is still there."""
    path = tmp_path / "store"
    _open(path).close()
    backup = _backup(path)
    with _open(path) as first:
        keys = fill(first, range(3))
        backup.replace(path / "index.sqlite")
        for suffix in ("-wal", "-shm"):
            (path / f"index.sqlite{suffix}").unlink()
        with _open(path) as second:
            assert not any(read(second, keys))
            assert not first.put(NAMESPACE, key_of(99), contents(key_of(99)))
            second.collect()
            assert all(read(second, keys))


def test_an_index_is_replaced_while_a_process_reads_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process knows that what it made is not the index of the store."""
    path = tmp_path / "store"
    with _open(path) as store:
        keys = fill(store, range(5))
    backup, recover = _backup(path), Index.recover
    (path / "index.sqlite").unlink()

    def slowly(self: Index, *args: Any) -> None:
        if backup.exists():
            backup.replace(path / "index.sqlite")
        recover(self, *args)

    monkeypatch.setattr(Index, "recover", slowly)
    with _open(path) as store:
        assert not store.put(NAMESPACE, key_of(99), contents(key_of(99)))
        with _open(path) as other:
            keys += fill(other, range(10, 15))
    with _open(path) as store:
        assert all(read(store, keys))


@pytest.mark.parametrize("when", ["opened", "collected"])
def test_an_index_is_replaced_between_two_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A process that wrote to one and read from the other would delete what it did not read."""
    path = tmp_path / "store"
    with _open(path) as store:
        keys = fill(store, range(4))
    backup, connect = _backup(path), index.connect
    with _open(path) as store:
        keys += fill(store, range(10, 18))

    def slowly(file: Path | None) -> Any:
        found = connect(file)
        if file and backup.exists():
            backup.replace(file)
        return found

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_open(path)) if when == "collected" else None
        monkeypatch.setattr(index, "connect", slowly)
        store = store or stack.enter_context(_open(path))
        for _ in range(2):
            with contextlib.suppress(HiSparseError):
                store.collect(1.0)
    with _open(path) as store:
        assert all(read(store, keys))


def test_a_segment_is_cut_and_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store opens, and what is left is read."""
    with FileStore(tmp_path, 1 << 30) as store:
        keys = fill(store, range(30))
    os.truncate(segment_files(tmp_path)[0], 20 * _RECORD)
    with largest_file(19 * _RECORD), _open(tmp_path) as store:
        assert read(store, keys) == [True] * 20 + [False] * 10
    assert "10 pages are dropped from the index" in caplog.text
    with _open(tmp_path) as store:
        fill(store, range(20, 30))
        assert all(read(store, keys))


def test_the_index_is_deleted_while_the_store_is_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _open(tmp_path) as first:
        keys = fill(first, range(20))
        for file in tmp_path.glob("index.sqlite*"):
            file.unlink()
        # Another process finds all pages, though nobody makes the index beside the first.
        with _open(tmp_path) as second:
            assert all(read(second, keys)) and not (tmp_path / "index.sqlite").exists()
        with caplog.at_level(logging.WARNING):
            assert not first.put(NAMESPACE, key_of(99), contents(key_of(99)))
        assert "takes nothing: its index was deleted or replaced while it was open" in caplog.text
        assert all(read(first, keys))
        first.flush()
        # From now on another process may make it.
        with _open(tmp_path) as third:
            assert all(read(third, keys))
            keys += fill(third, range(20, 25))
            assert third.collect(1.0) == 0
    with _open(tmp_path) as store:
        assert all(read(store, keys))


def test_other_files_are_no_segments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _open(tmp_path) as store:
        keys = fill(store, range(5))
    names = ["1.seg", "-000000000000001.seg", "f" * 16 + ".seg", "0" * 15 + "A.seg", "notes"]
    for name in names:
        shutil.copy(segment_files(tmp_path)[-1], tmp_path / "segments" / name)
    (tmp_path / "index.sqlite").unlink()
    with _open(tmp_path) as store:
        assert all(read(store, keys))
        store.collect(1.0)
        assert all(read(store, keys))
    lines = [x for x in caplog.messages if "is no segment of a store and is ignored" in x]
    assert sorted(line.split(" ")[0] for line in lines) == sorted(
        str(tmp_path / "segments" / name) for name in names
    )
    assert all((tmp_path / "segments" / name).exists() for name in names)


def test_a_new_folder_outlives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders that name it are on the disk, as far up as they are new."""
    fsync, synced = os.fsync, set()

    def sync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    path = tmp_path / "a" / "b"
    with FileStore(path, size_in_bytes("size", 0.5, path)) as store:
        fill(store, range(3))
        store.flush()
        folders = [tmp_path, tmp_path / "a", path, path / "segments"]
        assert {str(x) for x in [*folders, *segment_files(path)]} <= synced
