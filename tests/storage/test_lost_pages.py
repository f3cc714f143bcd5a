"""Damaged, lost and outdated files: a page is whole or absent; what was acknowledged is there."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.errors import HiSparseError
from hisparse.storage import FileStore
from tests.storage.pages import NAMESPACE, fill, key_of, read, segment_files

_BLOCK = 4096
#: Of a record of a test page: a block of header, two of page, the second with 3,184 unused bytes.
_RECORD, _USED = 3 * _BLOCK, _BLOCK + NAMESPACE.page_bytes


def _filled(folder: Path, count: int) -> list[str]:
    with FileStore(folder, 1 << 30) as store:
        return fill(store, range(count))


def _damaged(rng: random.Random, record: bytes, other: bytes) -> bytes:
    """A record with a change in its header or page."""
    changed, at = bytearray(record), rng.randrange(_USED)
    end = min(_USED, at + rng.randrange(1, 200))
    change = rng.randrange(4)
    if change == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif change == 1:
        changed[at:end] = bytes(end - at)
    elif change == 2:
        changed[at:end] = rng.randbytes(end - at)
    else:
        # The whole record of another page, as a wrong sector would give.
        return other
    if changed == record:
        changed[at] ^= 1
    return bytes(changed)


def test_a_thousand_damaged_records_give_no_wrong_byte(tmp_path: Path) -> None:
    """Neither as the index knows them, nor after it is made anew from them."""
    keys = _filled(tmp_path, 1100)
    (file,) = segment_files(tmp_path)
    data, rng, broken = bytearray(file.read_bytes()), random.Random(0), set()
    whole = bytes(data)
    for number in rng.sample(range(1100), 1000):
        at, other = number * _RECORD, rng.choice([x for x in range(0, 1100, 7) if x != number])
        record = _damaged(
            rng, whole[at : at + _RECORD], whole[other * _RECORD : (other + 1) * _RECORD]
        )
        data[at : at + _RECORD] = record
        assert record[:_USED] != whole[at : at + _USED]
        broken.add(number)
    file.write_bytes(data)
    assert len(broken) == 1000
    with FileStore(tmp_path) as store:
        expected = [number not in broken for number in range(1100)]
        assert read(store, keys) == expected
        assert store.counters["damaged"] == len(broken)
        assert read(store, keys) == expected
        assert store.describe().pages == sum(expected)
    (tmp_path / "index.sqlite").unlink()
    with FileStore(tmp_path) as store:
        found = read(store, keys)
        # A page that is damaged in its place may be whole in that of another.
        assert all(found[number] for number in range(1100) if number not in broken)
        assert read(store, keys) == found
        assert store.describe().pages == sum(found)


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    keys = _filled(tmp_path, 10)
    (file,) = segment_files(tmp_path)
    data = bytearray(file.read_bytes())
    data[3 * _RECORD + 20] ^= 1
    data[5 * _RECORD + _BLOCK + 4999] ^= 1
    file.write_bytes(data[: 10 * _RECORD - 1])
    with FileStore(tmp_path) as store:
        report = store.verify()
        # The index dropped the last, which is cut short, when it was opened.
        assert report.pages == 9
        found = [(x.segment, x.offset, x.key, x.reason) for x in report.damaged]
        assert found == [
            (file.name, 3 * _RECORD, keys[3], "header"),
            (file.name, 5 * _RECORD, keys[5], "checksum of part 0"),
        ]
        assert store.verify().damaged == ()
        assert store.describe().pages == 7


def test_a_segment_that_is_cut_or_deleted_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FileStore(tmp_path, 1 << 30, segment_bytes=3 * _RECORD) as store:
        keys = fill(store, range(9))
        first, second, _ = segment_files(tmp_path)
        os.truncate(first, _RECORD + 100)
        second.unlink()
        assert read(store, keys) == [True, *[False] * 5, True, True, True]
        assert store.counters["damaged"] == 5
    # The first, and once the store is closed their number: a bad disk fills no log.
    line, total = caplog.messages
    assert " is dropped: " in line and "5 damaged pages were dropped" in total


def _lose(index: Path) -> None:
    index.unlink()


def _empty(index: Path) -> None:
    index.write_bytes(b"")


def _cut(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


def _overwrite(index: Path) -> None:
    index.write_bytes(random.Random(0).randbytes(20_000))


def _scribble(index: Path) -> None:
    """Overwrite all but the first page of the file."""
    data = index.read_bytes()
    index.write_bytes(data[:_BLOCK] + b"\xff" * (len(data) - _BLOCK))


def _other_version(index: Path) -> None:
    with sqlite3.connect(index) as database:
        database.execute("ALTER TABLE pages ADD COLUMN novel")
    database.close()


@pytest.mark.parametrize(
    "harm", [_lose, _empty, _cut, _overwrite, _scribble, _other_version], ids=lambda f: f.__name__
)
def test_an_index_is_made_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    keys = _filled(tmp_path, 20)
    harm(tmp_path / "index.sqlite")
    with FileStore(tmp_path) as store:
        assert store.find(NAMESPACE, keys) == 20
        assert all(read(store, keys))
        report = store.describe()
        assert report.live_bytes == report.segment_bytes == 20 * _RECORD
        assert report.namespaces[0].namespace == NAMESPACE


def test_an_index_of_before_a_collection_finds_what_was_copied(tmp_path: Path) -> None:
    keys = _filled(tmp_path, 20)
    with FileStore(tmp_path) as store:
        shutil.copy(tmp_path / "index.sqlite", tmp_path / "yesterday")
        store.remove(NAMESPACE, keys[::2])
        assert store.collect(1.0) > 0
    (tmp_path / "yesterday").replace(tmp_path / "index.sqlite")
    with FileStore(tmp_path) as store:
        assert all(read(store, keys[1::2]))


def test_a_lookup_waits_for_no_writer(tmp_path: Path) -> None:
    keys = _filled(tmp_path, 3)
    with FileStore(tmp_path) as store:
        other = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        putting = threading.Thread(target=fill, args=(store, [9]))
        putting.start()
        try:
            # The put takes its turn when the other has ended; until then it holds no reader up.
            assert store.find(NAMESPACE, keys) == 3
            assert all(read(store, keys))
            assert store.find(NAMESPACE, [key_of(9)]) == 0
        finally:
            other.execute("COMMIT")
            other.close()
            putting.join()
        assert store.find(NAMESPACE, [key_of(9)]) == 1


def test_a_flush_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced, broken = os.fsync, set(), [True]

    def sync(fd: int) -> None:
        if broken.pop() if broken else False:
            raise OSError(errno.EIO, "Input/output error")
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    with FileStore(tmp_path, segment_bytes=_RECORD) as store:
        fill(store, range(4))
        monkeypatch.setattr(os, "fsync", sync)
        with pytest.raises(HiSparseError, match=r"^store '.*': OSError: .*Input/output error"):
            store.flush()
        store.flush()
        assert set(map(str, segment_files(tmp_path))) <= synced


def test_a_collection_killed_after_it_deleted_a_file(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 30, segment_bytes=2 * _RECORD) as store:
        keys = fill(store, range(8))
        # What is left of the other process: its file is gone, and the index does not know.
        segment_files(tmp_path)[0].unlink()
        assert store.describe().segment_bytes == 8 * _RECORD
        store.collect()
        assert store.describe().segment_bytes == 6 * _RECORD
        assert read(store, keys) == [False] * 2 + [True] * 6


def test_an_index_that_is_ahead_of_the_segments(tmp_path: Path) -> None:
    """As a loss of power may leave it, before a flush."""
    with FileStore(tmp_path, 1 << 30, segment_bytes=5 * _RECORD) as store:
        keys = fill(store, range(15))
    first, second, third = segment_files(tmp_path)
    os.truncate(first, 2 * _RECORD + 50)
    second.unlink()
    third.write_bytes(bytes(third.stat().st_size))
    with FileStore(tmp_path) as store:
        assert read(store, keys) == [True, True, *[False] * 13]
        assert store.describe().pages == 2
        fill(store, range(2, 15))
        assert all(read(store, keys))


@pytest.mark.parametrize("cut", [1, 100, _BLOCK, _BLOCK + 1, 2 * _BLOCK + 5, _RECORD - 1])
def test_a_record_that_was_half_written(tmp_path: Path, cut: int) -> None:
    """As a kill in the middle of a put leaves it; nothing is written to the file any more."""
    keys = _filled(tmp_path, 3)
    (file,) = segment_files(tmp_path)
    os.truncate(file, 2 * _RECORD + cut)
    with FileStore(tmp_path) as store:
        assert read(store, keys) == [True, True, False]
        before = file.stat().st_size
        fill(store, [2, 3])
        assert file.stat().st_size == before
        assert all(read(store, [*keys, key_of(3)]))
    (tmp_path / "index.sqlite").unlink()
    with FileStore(tmp_path) as store:
        assert all(read(store, [*keys, key_of(3)]))


def test_half_a_record_hides_nothing_that_comes_behind_it(tmp_path: Path) -> None:
    """Though a process that is not alone does not bring the index up to date."""
    with FileStore(tmp_path, 1 << 30):
        with FileStore(tmp_path) as store:
            keys = fill(store, range(3))
        (file,) = segment_files(tmp_path)
        content = file.read_bytes()
        file.write_bytes(content + content[: 2 * _BLOCK])
        with FileStore(tmp_path) as store:
            keys += fill(store, range(3, 6))
            assert len(file.read_bytes()) == len(content) + 2 * _BLOCK
    (tmp_path / "index.sqlite").unlink()
    with FileStore(tmp_path) as store:
        assert all(read(store, keys))
