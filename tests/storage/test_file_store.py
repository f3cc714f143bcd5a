"""What is put is found and read back, by whoever opens the folder; all else is refused."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import ConfigError, HiSparseError
from hisparse.storage import FileStore
from tests.storage.pages import (
    DISK_BYTES,
    NAMESPACE,
    contents,
    fill,
    key_of,
    let_age,
    page_file,
    page_files,
    read,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store", 1 << 30) as store:
        yield store


def test_pages_are_read_whole(store: FileStore) -> None:
    keys = fill(store, range(20))
    assert read(store, [*keys, key_of(99)]) == [True] * 20 + [False]
    assert store.counters["hits"] == 20 and store.counters["misses"] == 1
    assert store.counters["puts"] == 20
    assert store.counters["put_bytes"] == 20 * NAMESPACE.page_bytes


def test_find_counts_pages_up_to_the_first_that_is_absent(store: FileStore) -> None:
    keys = [key_of(number) for number in range(60)]
    fill(store, [*range(50), *range(51, 60)])
    assert store.find(NAMESPACE, keys) == 50
    assert store.find(NAMESPACE, keys[51:]) == 9
    assert store.find(NAMESPACE, [key_of(-1), *keys]) == 0
    assert store.find(NAMESPACE, []) == 0
    assert store.find(NAMESPACE, [keys[0].upper()]) == 1


@pytest.mark.parametrize(
    "other",
    [{"model": "tiny2"}, {"kv_dtype": "float16"}, {"page_size": 8}, {"num_ranks": 2},
     {"num_ranks": 2, "rank": 1}, {"page_bytes": 5004}, {"version": 2}],
    ids=str,
)  # fmt: skip
def test_namespaces_share_a_folder_and_no_page(store: FileStore, other: dict[str, Any]) -> None:
    namespace = replace(NAMESPACE, **other)
    assert namespace.key != NAMESPACE.key
    (key,) = fill(store, [1])
    assert store.find(namespace, [key]) == 0
    assert read(store, [key], namespace) == [False]
    assert store.put(namespace, key, contents(key, namespace))
    assert read(store, [key], namespace) == read(store, [key]) == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model: got ''"),
        ({"kv_dtype": "x" * 300}, "kv_dtype: got"),
        ({"model": "a\nb"}, r"model: got 'a\\nb'"),
        ({"rank": 1}, "rank: got 1, expected 0 to 0"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"page_bytes": 0}, "page_bytes: got 0, expected 1 to 1,073,741,823"),
        ({"page_bytes": 1 << 30}, "page_bytes: got 1073741824"),
    ],
)
def test_a_namespace_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(NAMESPACE, **change)


def test_the_longest_names(store: FileStore) -> None:
    namespace = replace(
        NAMESPACE, model='"' * 256, kv_dtype="\\" * 256, page_size=2**31 - 1, num_ranks=2**31 - 1,
        rank=2**31 - 2, version=2**31 - 1,
    )  # fmt: skip
    key = "ab" * 64
    assert store.put(namespace, key, contents(key, namespace))
    assert read(store, [key], namespace) == [True]
    assert store.describe().namespaces[0].namespace == namespace


def test_a_page_is_written_once(store: FileStore, tmp_path: Path) -> None:
    (key,) = fill(store, [1])
    before = page_file(tmp_path / "store", key).stat()
    assert not store.put(NAMESPACE, key, contents(key))
    assert store.counters["duplicates"] == 1
    assert page_file(tmp_path / "store", key).stat() == before


def test_two_writers_of_one_key(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(100)]
    with FileStore(tmp_path, 1 << 30) as one, FileStore(tmp_path) as other:

        def write(store: FileStore) -> list[bool]:
            return [store.put(NAMESPACE, key, contents(key)) for key in keys]

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(write, (one, other))
        assert [a + b for a, b in zip(first, second, strict=True)] == [1] * 100
        assert all(read(one, keys)) and all(read(other, keys))
        assert one.describe().pages == 100


def test_threads_share_a_store(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(60)]
    with FileStore(tmp_path, 1 << 30) as store:

        def work(seed: int) -> int:
            rng, taken = random.Random(seed), 0
            for _ in range(40):
                key = rng.choice(keys)
                taken += store.put(NAMESPACE, key, contents(key))
                assert read(store, [key]) == [True]
                read(store, rng.sample(keys, 5))
            return taken

        with ThreadPoolExecutor(6) as pool:
            taken = sum(pool.map(work, range(6)))
        assert taken == store.describe().pages == store.counters["puts"]


def test_large_reads_are_shared_among_threads(store: FileStore) -> None:
    namespace = replace(NAMESPACE, page_bytes=600_000)
    keys = fill(store, range(12), namespace)
    order = random.Random(0).sample([*keys, key_of(77)], 13)
    assert read(store, order, namespace) == [key != key_of(77) for key in order]


@pytest.mark.parametrize("key", ["", "abc", "zz", "ab cd", " ab", "ab" * 65, "é" * 2])
def test_a_key_that_is_none(store: FileStore, key: str) -> None:
    for call in (
        lambda: store.find(NAMESPACE, [key]),
        lambda: store.get(NAMESPACE, [key], [bytearray(NAMESPACE.page_bytes)]),
        lambda: store.put(NAMESPACE, key, contents(key_of(1))),
    ):
        with pytest.raises(ConfigError, match="key: got .*, expected 2 to 128 hexadecimal digits"):
            call()


def test_buffers_that_do_not_fit(store: FileStore) -> None:
    (key,) = fill(store, [1])
    size = NAMESPACE.page_bytes
    with pytest.raises(ConfigError, match="got 0 buffers for 1 keys"):
        store.get(NAMESPACE, [key], [])
    with pytest.raises(ConfigError, match="buffer of 7 bytes, expected 5,003"):
        store.get(NAMESPACE, [key], [bytearray(7)])
    with pytest.raises(ConfigError, match="read-only"):
        store.get(NAMESPACE, [key], [bytes(size)])
    with pytest.raises(ConfigError, match="contiguous"):
        store.get(NAMESPACE, [key], [memoryview(bytearray(2 * size))[::2]])
    with pytest.raises(ConfigError, match="buffer of 1 bytes, expected 5,003"):
        store.put(NAMESPACE, key_of(2), bytes(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size: got 0 bytes, expected more than 0"),
        ({"size": 1.5}, r"size: got 1.5, expected a fraction in \(0, 1\)"),
        ({"size": "much"}, "size: got 'much', expected a size such as '64GiB'"),
        ({"ttl_s": 0}, "ttl_s: got 0, expected seconds above 0"),
        ({"ttl_s": float("nan")}, "ttl_s: got nan"),
        ({"create": False}, "expected the folder of a store"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FileStore(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HiSparseError, match=r"^store '.*/file': got \w+Error: .*$"):
        FileStore(tmp_path / "file")


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("path", ["~nobody-here/x", "a\0b", "x" * 300], ids=["user", "nul", "long"])
def test_a_path_that_cannot_be(path: str, create: bool) -> None:
    with pytest.raises(HiSparseError, match=r"^[^\n]{10,600}$"):
        FileStore(path, create=create)


def test_a_closed_store_holds_nothing_and_leaves_no_file_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    store = FileStore(tmp_path, 1 << 30)
    keys = fill(store, range(20))
    assert all(read(store, keys))
    store.close()
    store.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert store.find(NAMESPACE, keys) == 0
    assert not any(read(store, keys))
    assert not store.put(NAMESPACE, key_of(99), contents(key_of(99)))


def test_what_a_store_says_about_itself(store: FileStore, tmp_path: Path) -> None:
    other = replace(NAMESPACE, kv_dtype="float16", page_bytes=50_000)
    fill(store, range(3))
    fill(store, range(4), other)
    report = store.describe()
    assert [(use.namespace, use.pages) for use in report.namespaces] == [(other, 4), (NAMESPACE, 3)]
    # A page takes whole blocks of 4 KiB.
    sizes = [4 * 13 * 4096, 3 * DISK_BYTES]
    assert (report.pages, report.bytes) == (7, sum(sizes))
    assert [use.bytes for use in report.namespaces] == sizes
    # Without its name a namespace is not told; who puts a page into it names it again.
    (tmp_path / "store" / "pages" / other.key / "namespace.json").unlink()
    assert store.describe().pages == 7 and len(store.describe().namespaces) == 1
    with FileStore(tmp_path / "store") as again:
        fill(again, [9], other)
        assert len(again.describe().namespaces) == 2


def test_a_fraction_is_of_the_file_systems_size(tmp_path: Path) -> None:
    with FileStore(tmp_path, 0.25) as store:
        assert store._size_bytes == shutil.disk_usage(tmp_path).total // 4


def test_removed_pages_are_gone(tmp_path: Path) -> None:
    other = replace(NAMESPACE, model="other")
    with FileStore(tmp_path, 1 << 30) as store:
        keys = fill(store, range(4))
        fill(store, range(4), other)
        assert store.remove(NAMESPACE, keys[:1]) == 1
        assert store.remove(NAMESPACE, keys[:1]) == 0
        assert read(store, keys) == [False, True, True, True]
        let_age(tmp_path, keys[1:], 100)
        read(store, keys[2:])
        assert store.remove(unused_s=50) == 1
        assert store.find(NAMESPACE, keys[2:]) == 2
        assert store.remove(NAMESPACE) == 2
        assert len(page_files(tmp_path)) == 4
        assert store.remove() == 4
        assert store.remove(replace(NAMESPACE, model="unknown")) == 0
        assert store.counters["collected_bytes"] == 8 * DISK_BYTES
        with pytest.raises(ConfigError, match="keys without a namespace"):
            store.remove(None, keys)


def test_calls_beside_close_end_without_an_error(tmp_path: Path) -> None:
    large = replace(NAMESPACE, page_bytes=700_000)
    with FileStore(tmp_path) as store:
        keys = fill(store, range(4), large)
    for turn in range(10):
        store = FileStore(tmp_path, 1 << 30)

        def work(first: int, store: FileStore = store) -> None:
            for number in range(30):
                read(store, keys, large)
                key = key_of(1000 * first + number)
                store.put(NAMESPACE, key, contents(key))

        with ThreadPoolExecutor(2) as pool:
            works = [pool.submit(work, 2 * turn + i) for i in range(2)]
            time.sleep(0.003 * turn)
            store.close()
            for each in works:
                each.result()


def test_a_file_system_without_hard_links(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert all(read(store, fill(store, range(3))))


def test_a_refused_page_is_not_found_though_a_lookup_saw_it(tmp_path: Path) -> None:
    """Another process has removed it since."""
    with FileStore(tmp_path, 3 * DISK_BYTES) as store, FileStore(tmp_path) as other:
        for each in (store, other):
            each._evictor.run_soon = lambda room: None  # type: ignore[method-assign]
        keys = fill(store, range(3))
        assert store.find(NAMESPACE, keys) == 3
        other.remove(NAMESPACE, keys[:1])
        fill(other, [3])
        assert not store.put(NAMESPACE, keys[0], contents(keys[0]))
        assert store.find(NAMESPACE, keys) == 0


def test_no_call_waits_for_another_process(tmp_path: Path) -> None:
    """Even one that was stopped with a lock of every file."""
    with FileStore(tmp_path, 1 << 30) as store:
        keys = fill(store, range(3))
        store._evictor.stop()
        files = [os.open(x, os.O_RDONLY) for x in (tmp_path, *tmp_path.rglob("*"))]
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(store.find, NAMESPACE, keys).result(10) == 3
            assert pool.submit(read, store, keys).result(10) == [True] * 3
            assert pool.submit(fill, store, [9]).result(10)
            assert pool.submit(store.collect, 0).result(10) == 0, "who has the lock evicts"
        for file in files:
            os.close(file)
