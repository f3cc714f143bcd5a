"""A full store: which pages leave, that space is given back, and that nothing else is lost."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hisparse.storage import FileStore, evict, pages
from tests.processes import largest_file, wait_until
from tests.sizes import sized
from tests.storage.pages import (
    DISK_BYTES,
    NAMESPACE,
    contents,
    disk_bytes,
    fill,
    key_of,
    let_age,
    page_file,
    page_files,
    read,
)


def _small(path: Path, pages: int, *, background: bool = False, **options: Any) -> FileStore:
    """A store for so many pages."""
    store = FileStore(path, pages * DISK_BYTES, **options)
    if not background:
        store._evictor.run_soon = lambda room: None  # type: ignore[method-assign]
    return store


def _fill_slowly(store: FileStore, path: Path, count: int) -> list[str]:
    keys = fill(store, range(count))
    for number, key in enumerate(keys):
        let_age(path, [key], 100 * (count - number))
    return keys


def test_the_least_recently_used_leave_first(tmp_path: Path) -> None:
    with _small(tmp_path, 20) as store:
        keys = _fill_slowly(store, tmp_path, 20)
        read(store, keys[2:6])
        assert store.collect(10 * DISK_BYTES) == 10 * DISK_BYTES
        left = [*keys[2:6], *keys[14:]]
        assert [key for key in keys if store.find(NAMESPACE, [key])] == left
        assert disk_bytes(tmp_path) == 10 * DISK_BYTES
        assert store.counters["evicted"] == 10
        assert all(read(store, left))


@pytest.mark.parametrize("is_read", [False, True], ids=["written", "read"])
def test_the_end_of_a_prefix_leaves_before_its_beginning(
    tmp_path: Path, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: Iterator[int] = iter(range(60 * 10**16, 2**63, 10**9))
    monkeypatch.setattr("hisparse.storage.pages.time.time_ns", lambda: next(times))
    with _small(tmp_path, 20) as store:
        keys = fill(store, range(20))
        if is_read:
            assert all(read(store, keys))
        store.collect(10 * DISK_BYTES)
        assert store.find(NAMESPACE, keys) == store.describe().pages == 10


@pytest.mark.parametrize("ttl_s", [None, 100.0])
@pytest.mark.parametrize("seed", range(sized(2, 50)))
def test_any_state_of_a_store_agrees_with_the_definition(
    seed: int, ttl_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup ends at the first page that is absent or expired, also with holes."""
    monkeypatch.setattr(pages, "_SEEN_S", -1.0)
    rng, page = random.Random(seed), replace(NAMESPACE, page_bytes=1)
    ages, keys = dict[str, int](), [key_of(i) for i in range(40)]

    def is_there(key: str) -> bool:
        return key in ages and (ttl_s is None or ages[key] < ttl_s)

    with _small(tmp_path, 99, ttl_s=ttl_s) as one, _small(tmp_path, 99, ttl_s=ttl_s) as two:
        for _ in range(60):
            first, store = rng.randrange(40), rng.choice((one, two))
            part = keys[first : first + rng.randrange(20)]
            action = rng.choice(("put", "put", "read", "remove", "wait"))
            if action == "put":
                for key in part:
                    assert store.put(page, key, contents(key, page)) == (not is_there(key))
                    if not is_there(key):
                        ages[key] = 0
            elif action == "read":
                found = read(store, part, page)
                assert found == list(map(is_there, part))
                ages |= {key: 0 for key, ok in zip(part, found, strict=True) if ok}
            elif action == "remove":
                assert store.remove(page, part[:3]) == len(ages.keys() & set(part[:3]))
                for key in part[:3]:
                    ages.pop(key, None)
            else:
                for key in ages:
                    ages[key] += 60
                    file = page_file(tmp_path, key, page)
                    os.utime(file, ns=(0, file.stat().st_mtime_ns - 60_000_000_000))
            expected = next((i for i, key in enumerate(part) if not is_there(key)), len(part))
            assert two.find(page, part) == expected


def test_a_lookup_believes_an_earlier_one_for_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own process it knows what is gone."""
    with FileStore(tmp_path) as store, FileStore(tmp_path) as other:
        keys = fill(store, range(5))
        assert store.find(NAMESPACE, keys) == other.find(NAMESPACE, keys) == 5
        other.remove(NAMESPACE, keys[3:4])
        assert (store.find(NAMESPACE, keys), other.find(NAMESPACE, keys)) == (5, 3)
        assert read(store, keys) == [True, True, True, False, True]
        fill(other, [3])
        # The other store's first scan goes first.
        wait_until(lambda: other.collect(4 * DISK_BYTES))
        assert other.find(NAMESPACE, keys) < 5
        later = time.monotonic() + 10
        monkeypatch.setattr("hisparse.storage.pages.time.monotonic", lambda: later)
        assert store.find(NAMESPACE, keys) == other.find(NAMESPACE, keys)


@pytest.mark.sweeps
def test_the_size_is_kept_under_a_stream_of_pages(tmp_path: Path) -> None:
    """Eviction runs beside puts and reads; every page that is found is whole."""
    rng, limit, deadline = random.Random(0), 40 * DISK_BYTES, time.monotonic() + 60
    with _small(tmp_path, 40, background=True) as store:
        number = 0
        while number < sized(60, 5000) or not store.counters["evicted"]:
            assert time.monotonic() < deadline, store.counters
            key = key_of(number)
            if store.put(NAMESPACE, key, contents(key)):
                number += 1
            else:
                # Full: an eviction is under way, or is begun a second after the last.
                store.collect()
            assert disk_bytes(tmp_path) <= limit + DISK_BYTES
            read(store, [key_of(rng.randrange(number + 1)) for _ in range(3)])
        assert store.counters["damaged"] == 0
    with FileStore(tmp_path) as store:
        assert store.describe().bytes == disk_bytes(tmp_path)
        assert store.verify().damaged == ()


def test_a_put_above_the_high_water_mark_begins_eviction(tmp_path: Path) -> None:
    with _small(tmp_path, 20, background=True) as store:
        number, deadline = 0, time.monotonic() + 30
        while not store.counters["evicted"]:
            assert time.monotonic() < deadline
            number += store.put(NAMESPACE, key_of(number), contents(key_of(number)))
            time.sleep(0.001)
        assert number >= 16
        store._evictor.stop()
        assert store.describe().pages <= 19


def test_a_full_store_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    with _small(tmp_path, 10) as store, _small(tmp_path, 10) as other:
        keys = fill(store, range(6)) + fill(other, range(6, 10))
        for each in (store, other):
            assert not each.put(NAMESPACE, key_of(10), contents(key_of(10)))
            assert each.counters["refused_size"] == 1
        assert all(read(store, keys))
        store.collect()
        fill(other, [10])


def test_the_sum_of_all_pages_is_found_again(tmp_path: Path) -> None:
    """A killed process left a wrong sum, or the file with it is lost."""
    with _small(tmp_path, 10) as store:
        fill(store, range(6))
        for wrong in (b"", bytes(8), b"\xff" * 77, b"\x7f" * 16, None):
            if wrong is None:
                (tmp_path / "hisparse.size").unlink()
            else:
                (tmp_path / "hisparse.size").write_bytes(wrong)
            store.collect()
            assert store._folder.add_bytes(0) == 6 * DISK_BYTES
        (tmp_path / "hisparse.size").write_bytes(b"\x81" * 40)
        with FileStore(tmp_path, 10 * DISK_BYTES) as other:
            other.find(NAMESPACE, [key_of(0)])
            wait_until(lambda: other._folder.add_bytes(0) == 6 * DISK_BYTES)


def test_pages_that_are_large_for_their_store(tmp_path: Path) -> None:
    """One that is larger than the high-water mark leaves room evicts others, one that cannot fit
    does not."""
    namespace = replace(NAMESPACE, page_bytes=12 * 4096)
    with FileStore(tmp_path / "a", 20 * 4096) as store:
        for key in map(key_of, range(2)):
            wait_until(partial(store.put, namespace, key, contents(key, namespace)))
        assert read(store, [key], namespace) == [True]
    with FileStore(tmp_path / "b", 12 * 4096) as store:
        keys = fill(store, range(2))
        assert not store.put(namespace, key, contents(key, namespace))
        store._evictor.stop()
        assert all(read(store, keys))


def test_pages_are_read_and_written_beside_an_eviction(tmp_path: Path) -> None:
    """By another process; one at a time evicts."""
    with _small(tmp_path, 100) as store, _small(tmp_path, 100) as other:
        keys = fill(store, range(40))
        let_age(tmp_path, keys[20:], 100)
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(read, other, keys[:20]) for _ in range(20)]
            for _ in range(10):
                store.collect(20 * DISK_BYTES)
                for key in keys[20:]:
                    assert store.put(NAMESPACE, key, contents(key))
                let_age(tmp_path, keys[20:], 100)
            assert all(all(each.result()) for each in reads)
        with store._folder.evicting() as alone:
            assert alone and other.collect(0) == 0
        assert (store.counters["damaged"], other.counters["damaged"]) == (0, 0)
        assert store.verify().damaged == ()


def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pages before it are kept, and pages after there is space again are stored."""
    with _small(tmp_path, 1000) as store:
        keys = fill(store, range(5))
        for limit in (0, 100, NAMESPACE.page_bytes + 15):
            with caplog.at_level(logging.ERROR), largest_file(limit):
                assert not store.put(NAMESPACE, key_of(50), contents(key_of(50)))
                assert all(read(store, keys))
            assert set(page_files(tmp_path)) == {page_file(tmp_path, key) for key in keys}
            assert not list(tmp_path.glob("pages/*/*.new"))
        assert store.counters["refused_disk"] == 3
        assert store._folder.add_bytes(0) == 5 * DISK_BYTES
        keys += fill(store, [50, 51])
        assert all(read(store, keys))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the tests may run as root, whom no permission stops."""
    with FileStore(tmp_path, 1 << 30) as writer:
        keys = fill(writer, range(5))
        writer._evictor.stop()
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        monkeypatch.setattr(os, "access", lambda path, mode, **_: mode == os.F_OK)
        with FileStore(tmp_path, 1 << 30) as store:
            assert all(read(store, keys))
            assert not store.put(NAMESPACE, key_of(9), contents(key_of(9)))
            assert store.counters["refused_read_only"] == 1
            assert store.collect() == store.remove() == 0
            store.flush()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_eviction_that_the_system_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evict.Evictor, "run", lambda *_: os.stat(tmp_path / "nothing"))
    with _small(tmp_path, 10, background=True) as store:
        keys = fill(store, range(10))
        assert all(read(store, keys))
    assert f"store {tmp_path}: cannot evict: FileNotFoundError: " in caplog.text


def test_expired_pages_leave_a_store_without_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first use, and once a minute; files that killed writers left go with them."""

    def wait_for(num_files: int) -> None:
        def is_done() -> bool:
            store.find(NAMESPACE, keys)
            return len(list(tmp_path.glob("pages/*/*"))) == num_files + 1

        wait_until(is_done)

    with FileStore(tmp_path) as store:
        keys = fill(store, range(6))
    let_age(tmp_path, keys, 100)
    left = page_file(tmp_path, "1.new")
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    with FileStore(tmp_path, ttl_s=60) as store:
        assert store.find(NAMESPACE, keys) == 0
        wait_for(0)
        store._evictor._thread.join()
        let_age(tmp_path, fill(store, range(6)), 100)
        fill(store, [7])
        monkeypatch.setattr(store._evictor, "_due", store._evictor._due - evict._EACH_S)
        wait_for(1)


def test_pages_of_one_time(tmp_path: Path) -> None:
    """As a copy of the files has it: no more leave than have to."""
    with _small(tmp_path, 100) as store:
        keys = fill(store, range(40))
        for key in keys[10:]:
            os.utime(page_file(tmp_path, key), (1.7e9, 1.7e9))
        assert store.collect(25 * DISK_BYTES) == 15 * DISK_BYTES
        assert all(read(store, keys[:10])) and store.describe().pages == 25


def test_a_clock_that_is_set_back(tmp_path: Path) -> None:
    """What was used after it stays."""
    with _small(tmp_path, 100) as store:
        keys = fill(store, range(20))
        let_age(tmp_path, keys, -3600)
        read(store, keys[:5])
        used = keys[:5] + fill(store, range(20, 25))
        store.collect(15 * DISK_BYTES)
        assert all(read(store, used)) and store.describe().pages == 15


@pytest.mark.parametrize("is_folder", [False, True], ids=["page", "namespace"])
def test_pages_that_cannot_be_removed(
    is_folder: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An eviction goes on without them."""
    with _small(tmp_path, 100) as store:
        other = replace(NAMESPACE, model="other")
        old = fill(store, range(10), other)
        keys = fill(store, range(20))
        for key in old:
            os.utime(page_file(tmp_path, key, other), (1, 1))
        kept, remove = set(old if is_folder else old[:1]), pages.PageFolder.remove

        def refuse(self: pages.PageFolder, key: str) -> int:
            if self.key == other.key and key in kept:
                raise PermissionError(1, "Operation not permitted")
            return remove(self, key)

        monkeypatch.setattr(pages.PageFolder, "remove", refuse)
        if is_folder:
            is_writable = property(lambda self: self.key != other.key)
            monkeypatch.setattr(pages.PageFolder, "is_writable", is_writable)
        store.collect(20 * DISK_BYTES)
        assert store.describe().pages == (20 if is_folder else 21)
        assert store._folder.add_bytes(0) == disk_bytes(tmp_path)
        assert sum(read(store, old, other)) == len(kept)
        assert any(read(store, keys)) and ("cannot be removed" in caplog.text) != is_folder


@pytest.mark.parametrize("act", ["put", "remove"])
def test_what_happens_during_a_scan_is_not_forgotten(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of all pages is never too low after it, and right after the next."""
    scan = pages.PageFolder.scan
    with _small(tmp_path, 100) as store, _small(tmp_path, 100) as other:
        keys = fill(store, range(20))

        def slowly(self: pages.PageFolder) -> Iterator[pages.PageFile]:
            if act == "remove":
                assert other.remove(NAMESPACE, keys) == 20
            yield from scan(self)
            if act == "put":
                fill(other, range(20, 40))

        with monkeypatch.context() as patch:
            patch.setattr(pages.PageFolder, "scan", slowly)
            store.collect()
        assert store._folder.add_bytes(0) >= disk_bytes(tmp_path)
        store.collect()
        assert store._folder.add_bytes(0) == disk_bytes(tmp_path)
        assert other._folder.add_bytes(0) == disk_bytes(tmp_path)


def test_damaged_pages_give_their_bytes_back(tmp_path: Path) -> None:
    """Also in a store that one page fills."""
    with _small(tmp_path, 2) as store:
        keys = fill(store, range(2))
        for key in keys:
            page_file(tmp_path, key).write_bytes(bytes(NAMESPACE.page_bytes + 16))
        assert read(store, keys[:1]) == [False] and len(store.verify().damaged) == 1
        assert store._folder.add_bytes(0) == 0
        fill(store, range(2))


def test_a_time_to_live_that_began_before_1970(tmp_path: Path) -> None:
    with FileStore(tmp_path, ttl_s=2.0**31) as store:
        assert store.find(NAMESPACE, [key_of(0)]) == 0
        assert all(read(store, fill(store, range(3))))


def test_the_sum_of_all_pages_outlives_its_file(tmp_path: Path) -> None:
    """Processes that have the old file open go on in the new one, each in a place of its own."""
    first, second = _small(tmp_path, 1000), _small(tmp_path, 1000)
    with first, second:
        fill(first, range(3))
        fill(second, range(3, 6))
        (tmp_path / "hisparse.size").unlink()
        fill(first, range(6, 9))
        with _small(tmp_path, 1000) as third:
            fill(third, [9])
            for number, store in enumerate([second, third, first], start=10):
                fill(store, [number])
                assert store._folder.add_bytes(0) == disk_bytes(tmp_path)


def test_a_time_that_no_calendar_has(tmp_path: Path) -> None:
    with _small(tmp_path, 20) as store:
        keys = fill(store, range(20))
        os.utime(page_file(tmp_path, keys[0]), (1.5e10, 1.5e10))
        assert store.collect(10 * DISK_BYTES) == 10 * DISK_BYTES
        assert not store.find(NAMESPACE, keys[:1])


def test_an_eviction_for_which_there_is_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with _small(tmp_path, 20, background=True) as store:
        with monkeypatch.context() as none:
            none.setattr("threading.Thread.start", _raises)
            fill(store, range(20))
        assert "cannot evict: no thread" in caplog.text
    with FileStore(tmp_path) as store:
        assert store.describe().pages == 20


def _raises(self: Any) -> None:
    raise RuntimeError("no thread")


def test_an_eviction_ends_for_a_process_that_was_forked_during_it(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        read_end, write_end = os.pipe()
        with store._folder.evicting() as alone:
            child = os.fork()
            if not child:
                os.close(write_end)
                os.read(read_end, 1)
                os._exit(0)
        os.close(read_end)
        with store._folder.evicting() as again:
            assert alone and again
        os.close(write_end)
        os.waitpid(child, 0)
