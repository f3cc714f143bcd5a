"""A full store: which pages leave, that space is given back, and that nothing else is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparse.storage import FileStore, segments
from hisparse.storage.index import Index
from tests.processes import largest_file
from tests.sizes import FAULTS, sized
from tests.storage.pages import NAMESPACE, contents, fill, key_of, read, segment_files

_RECORD = 3 * 4096


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def _small(path: Path, pages: int, *, background: bool = False, **options: Any) -> FileStore:
    """A store for so many pages, with segments of two."""
    store = FileStore(path, pages * _RECORD, segment_bytes=2 * _RECORD, **options)
    if not background:
        store._collector.run_soon = lambda room: None
    return store


def _disk_bytes(path: Path) -> int:
    total = 0
    for file in segment_files(path):
        with contextlib.suppress(FileNotFoundError):  # A collection deletes files.
            total += file.stat().st_size
    return total


def _fill_slowly(store: FileStore, clock: Clock, count: int) -> list[str]:
    keys = []
    for number in range(count):
        clock.now += 10
        keys += fill(store, [number])
    return keys


def test_the_least_recently_used_leave_first(tmp_path: Path) -> None:
    clock = Clock()
    with _small(tmp_path, 20, clock=clock) as store:
        keys = _fill_slowly(store, clock, 20)
        clock.now += 10
        used = keys[2:6]
        read(store, used)
        store.collect(size_bytes=10 * _RECORD)
        left = [key for key in keys if store.find(NAMESPACE, [key])]
        assert set(used) <= set(left)
        # Of the others the last written.
        assert left == [*used, *keys[20 - len(left) + 4 :]]
        assert 2 <= len(left) <= 10
        assert _disk_bytes(tmp_path) <= 10 * _RECORD + 2 * _RECORD
        assert store.counters["evicted"] == 20 - len(left)
        assert all(read(store, left))


def test_the_end_of_a_prefix_leaves_before_its_beginning(tmp_path: Path) -> None:
    clock = Clock()
    with _small(tmp_path, 20, clock=clock) as store:
        keys = []
        for number in range(20):
            clock.now += 0.01
            keys += fill(store, [number])
        store.collect(size_bytes=10 * _RECORD)
        # But for the pages of the segment that is being written.
        assert store.find(NAMESPACE, keys) >= 6
        assert store.describe().pages <= 10


def test_the_least_often_used_leave_first(tmp_path: Path) -> None:
    clock = Clock()
    with _small(tmp_path, 20, policy="lfu", clock=clock) as store:
        keys = _fill_slowly(store, clock, 20)
        for _ in range(3):
            read(store, keys[:4])
        clock.now += 10
        read(store, keys[4:])
        store.collect(size_bytes=10 * _RECORD)
        assert all(store.find(NAMESPACE, [key]) for key in keys[:4])
        assert store.describe().pages <= 10


def test_pages_expire(tmp_path: Path) -> None:
    clock = Clock()
    with _small(tmp_path, 100, policy="ttl", ttl_s=60, clock=clock) as store:
        keys = fill(store, range(6))
        clock.now += 50
        read(store, keys[:2])
        clock.now += 50
        assert store.find(NAMESPACE, keys) == 2
        assert read(store, keys) == [True, True, *[False] * 4]
        # An expired page can be stored again.
        fill(store, [5])
        store.collect()
        assert store.describe().pages == 3
        assert _disk_bytes(tmp_path) <= 4 * _RECORD
        assert store.counters["evicted"] == 3


@pytest.mark.sweeps
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_size_is_kept_under_a_stream_of_pages(tmp_path: Path, policy: str) -> None:
    """Eviction runs beside puts and reads; every page that is found is whole."""
    rng, limit, deadline = random.Random(0), 40 * _RECORD, time.monotonic() + 60
    with _small(tmp_path, 40, policy=policy, background=True) as store:
        number = 0
        while number < sized(60, 5000) or not store.counters["evicted"]:
            assert time.monotonic() < deadline, store.counters
            key = key_of(number)
            if store.put(NAMESPACE, key, contents(key)):
                number += 1
            else:
                # Full: a collection is under way, or is begun a second after the last.
                store.collect()
            assert _disk_bytes(tmp_path) <= limit + 2 * _RECORD
            read(store, [key_of(rng.randrange(number + 1)) for _ in range(3)])
        assert store.counters["damaged"] == 0
    with FileStore(tmp_path) as store:
        report = store.describe()
        assert report.segment_bytes == _disk_bytes(tmp_path)
        assert report.live_bytes == report.pages * _RECORD
        assert store.verify().damaged == ()


def test_a_put_above_the_high_water_mark_begins_eviction(tmp_path: Path) -> None:
    with _small(tmp_path, 20, background=True) as store:
        fill(store, range(20))
        deadline = time.monotonic() + 30
        while not store.counters["collected_bytes"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert store.describe().pages <= 17


def test_a_full_store_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    with _small(tmp_path, 10) as store:
        keys = fill(store, range(10))
        assert not store.put(NAMESPACE, key_of(10), contents(key_of(10)))
        assert store.counters["refused_size"] == 1
        assert all(read(store, keys))
        store.collect()
        fill(store, [10])


def test_pages_that_are_large_for_their_store(tmp_path: Path) -> None:
    """One that is larger than the high-water mark leaves room evicts others, one that cannot fit
    does not."""
    namespace = replace(NAMESPACE, part_bytes=(12 * 4096,))
    with FileStore(tmp_path / "a", 20 * 4096, segment_bytes=4096) as store:
        deadline = time.monotonic() + 30
        for number in range(2):
            key = key_of(number)
            while not store.put(namespace, key, contents(key, namespace)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert read(store, [key], namespace) == [True]
    with FileStore(tmp_path / "b", 12 * 4096, segment_bytes=4096) as store:
        keys = fill(store, range(2))
        assert not store.put(namespace, key, contents(key, namespace))
        assert store._collector._thread is None
        assert all(read(store, keys))


def test_old_segments_are_copied_together(tmp_path: Path) -> None:
    """While another process reads on."""
    with FileStore(tmp_path, 1 << 30, segment_bytes=8 * _RECORD) as store:
        keys = fill(store, range(160))
        kept = keys[::4]
        store.remove(NAMESPACE, [key for key in keys if key not in kept])
        done, failures = threading.Event(), []

        def read_on() -> None:
            with FileStore(tmp_path) as other:
                while not done.is_set():
                    if not all(read(other, kept)):
                        failures.append(other.counters)

        thread = threading.Thread(target=read_on)
        thread.start()
        try:
            given_back = store.collect()
        finally:
            time.sleep(0.05)
            done.set()
            thread.join()
        assert not failures
        assert given_back == 160 * _RECORD - _disk_bytes(tmp_path)
        # At least half of what is left is alive.
        assert _disk_bytes(tmp_path) <= 2 * len(kept) * _RECORD
        assert all(read(store, kept))
        assert store.collect() == 0
    (tmp_path / "index.sqlite").unlink()
    with FileStore(tmp_path) as store:
        assert all(read(store, kept))
        assert store.describe().pages == len(kept)


@pytest.mark.parametrize("kept", [0, 2])
def test_a_collection_reads_beside_readers_whose_files_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Descriptors that nobody holds are closed at once; those of three readers, all the time."""
    monkeypatch.setattr(segments, "_MAX_OPEN", kept)
    with FileStore(tmp_path, 1 << 30, segment_bytes=3 * _RECORD) as store:
        store._collector.run_soon = lambda room: None
        keys = fill(store, range(45))
        done, rng = threading.Event(), random.Random(0)

        def read_on(order: list[str]) -> None:
            while not done.is_set():
                assert sum(read(store, order)) >= len(order) // 4

        with ThreadPoolExecutor(3) as pool:
            reading = [pool.submit(read_on, rng.sample(keys, 45)) for _ in range(3 if kept else 0)]
            try:
                for _ in range(FAULTS * 22 + 3):
                    gone = rng.sample(keys, len(keys) // 2)
                    store.remove(NAMESPACE, gone)
                    assert store.collect(1.0) > 0
                    assert all(read(store, [key for key in keys if key not in gone]))
                    for key in gone:
                        assert store.put(NAMESPACE, key, contents(key))
            finally:
                done.set()
            for each in reading:
                each.result()
        assert all(read(store, keys))
        assert (store.counters["damaged"], store.counters["read_errors"]) == (0, 0)


def test_a_segment_that_a_process_writes_is_left_alone(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 30) as writer, FileStore(tmp_path) as other:
        keys = fill(writer, range(5))
        writer.remove(NAMESPACE, keys[:4])
        assert other.collect(1.0) == 0
        assert read(writer, keys) == [False] * 4 + [True]
        assert writer.collect(1.0) == 4 * _RECORD
        assert read(other, keys) == [False] * 4 + [True]


def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pages before it are kept, and pages after there is space again are stored."""
    with FileStore(tmp_path, 1 << 30, segment_bytes=1 << 20) as store:
        keys, refused = [], 0
        with caplog.at_level(logging.ERROR), largest_file(20 * _RECORD + 5000):
            for number in range(60):
                key = key_of(number)
                if store.put(NAMESPACE, key, contents(key)):
                    keys.append(key)
                else:
                    refused += 1
            assert all(read(store, keys))
        assert keys and refused == store.counters["refused_disk"] == 60 - len(keys)
        assert store.find(NAMESPACE, keys) == len(keys)
        keys += fill(store, range(100, 103))
        assert all(read(store, keys))
    (tmp_path / "index.sqlite").unlink()
    with FileStore(tmp_path) as store:
        assert all(read(store, keys))


def test_an_index_that_is_full_takes_back_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FileStore(tmp_path, 1 << 30) as store:
        keys = fill(store, range(3))
        index = store._folder.index
        # As SQLite says it when the disk is full.
        with caplog.at_level(logging.ERROR):
            pages = index._database.execute("PRAGMA page_count").fetchone()[0]
            index._database.execute(f"PRAGMA max_page_count = {pages}")
            numbers = iter(range(10, 10_000))
            while store.put(NAMESPACE, key := key_of(next(numbers)), contents(key)):
                keys.append(key)
        assert store.counters["refused_disk"] == 1
        assert _disk_bytes(tmp_path) == len(keys) * _RECORD
        index._database.execute("PRAGMA max_page_count = 1000000")
        assert store.put(NAMESPACE, key, contents(key))
        assert all(read(store, [*keys, key]))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the tests may run as root, whom no permission stops."""
    with FileStore(tmp_path, 1 << 30) as writer:
        keys = fill(writer, range(5))
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        monkeypatch.setattr(os, "access", lambda path, mode, **_: False)
        with FileStore(tmp_path) as store:
            # Its index is a copy from when it was opened.
            assert all(read(store, keys))
            assert not store.put(NAMESPACE, key_of(9), contents(key_of(9)))
            assert store.counters["refused_read_only"] == 1
            assert store.collect() == 0
            store.flush()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_index_that_fails_makes_pages_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sqlite3

    def fail(*_: object) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    with FileStore(tmp_path, 1 << 30) as store:
        (key,) = fill(store, [1])
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(Index, "_all", fail)
            assert store.find(NAMESPACE, [key]) == 0
            assert read(store, [key]) == [False]
            assert not store.put(NAMESPACE, key_of(2), contents(key_of(2)))
        assert store.counters["index_errors"] == 2
        assert store.counters["refused_disk"] == 1
        assert read(store, [key]) == [True]
