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


@pytest.mark.parametrize(
    ("count", "is_open"), [(1100, False), (110, True)], ids=["a thousand", "in use"]
)
def test_damaged_records_give_no_wrong_byte(count: int, is_open: bool, tmp_path: Path) -> None:
    """Neither as the index knows them, nor after it is made anew from them."""
    keys = _filled(tmp_path, count)
    (file,) = segment_files(tmp_path)
    data, rng, broken = bytearray(file.read_bytes()), random.Random(0), set()
    whole = bytes(data)
    for number in rng.sample(range(count), count * 10 // 11):
        at, other = number * _RECORD, rng.choice([x for x in range(0, count, 7) if x != number])
        record = _damaged(
            rng, whole[at : at + _RECORD], whole[other * _RECORD : (other + 1) * _RECORD]
        )
        data[at : at + _RECORD] = record
        assert record[:_USED] != whole[at : at + _USED]
        broken.add(number)
    if not is_open:
        file.write_bytes(data)
    expected = [number not in broken for number in range(count)]
    with FileStore(tmp_path) as store:
        if is_open:
            assert all(read(store, keys))
            with file.open("r+b") as segment:  # Never shorter: another thread may be reading it.
                segment.write(data)
        assert read(store, keys) == expected
        assert store.counters["damaged"] == len(broken) == count * 10 // 11
        assert read(store, keys) == expected
        assert store.describe().pages == sum(expected)
    (tmp_path / "index.sqlite").unlink()
    with FileStore(tmp_path) as store:
        found = read(store, keys)
        # A page that is damaged in its place may be whole in that of another.
        assert all(found[number] for number in range(count) if number not in broken)
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


@pytest.mark.parametrize("num_bytes", [2**62, 4096, 6 * 4096])
def test_a_collection_believes_headers_alone(num_bytes: int, tmp_path: Path) -> None:
    """Sizes of a damaged index may be more than there is memory; the other page is copied."""
    with FileStore(tmp_path, 1 << 30) as store:
        keys = fill(store, range(3))
        store.remove(NAMESPACE, keys[2:])
        with sqlite3.connect(tmp_path / "index.sqlite") as database:
            database.execute("UPDATE pages SET bytes = ? WHERE offset = 0", [num_bytes])
            database.execute("UPDATE segments SET live = 3 * 4096")
        database.close()
        assert store.collect(1.0) > 0
        assert read(store, keys) == [False, True, False]
        assert store.counters["damaged"] == 1


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY], ids=["another file", "bad"])
def test_what_a_kept_descriptor_reads_is_read_anew_before_a_page_is_dropped(
    tmp_path: Path, flags: int
) -> None:
    with FileStore(tmp_path, 1 << 30, segment_bytes=24 * 4096) as store:
        keys = fill(store, range(8))
        store.remove(NAMESPACE, keys[::2])
        (file,) = segment_files(tmp_path)
        (tmp_path / "other").write_bytes(bytes(file.stat().st_size))

        def confuse() -> None:
            """What is read from the segment comes from another file, or is refused."""
            other = os.open(tmp_path / "other", flags)
            kept = store._folder.segments.open(int(file.stem, 16))
            os.dup2(other, kept._fd)
            os.close(other)

        confuse()
        assert read(store, keys[1:4]) == [True, False, True]
        confuse()
        assert store.collect(1.0) > 0
        assert all(read(store, keys[1::2]))
        assert (store.counters["damaged"], store.counters["read_errors"]) == (0, 0)


def test_a_collection_keeps_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And goes on with the other segments."""
    preadv = os.preadv

    def refuse(fd: int, views: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(first):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, views, offset)

    with FileStore(tmp_path, 1 << 30, segment_bytes=12 * 4096) as store:
        keys = fill(store, range(8))
        first, second = segment_files(tmp_path)
        store.remove(NAMESPACE, keys[::2])
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            store.collect(1.0)
        assert first.exists() and not second.exists()
        assert f"store {tmp_path}: {first.name} is not collected: OSError: " in caplog.text
        assert all(read(store, keys[1::2]))
        store.collect(1.0)
        assert not first.exists()
        assert all(read(store, keys[1::2]))
