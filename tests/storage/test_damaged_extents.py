"""Extents that are cut, flipped or unreadable: absent, counted and stored again, and no others."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from pathlib import Path

import pytest

from hisparse.storage import FileStore
from tests.sizes import sized
from tests.storage.pages import NAMESPACE, fill, read, segment_files

_COUNT = sized(100, 1000)
_USED = 4096 + NAMESPACE.page_bytes


def _damage(file: Path, rng: random.Random) -> None:
    """Cut the file in its record, or flip a bit of the header or the page."""
    at = rng.randrange(_USED)
    if rng.random() < 0.5:
        os.truncate(file, at)
        return
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


@pytest.mark.sweeps
def test_each_is_absent_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that has the files open; ``test_lost_pages.py`` has those at rest."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # A thousand of them take long.
    rng = random.Random(0)
    with FileStore(tmp_path, segment_bytes=1) as store:
        keys = fill(store, range(_COUNT))
        files = segment_files(tmp_path)
        assert len(files) == _COUNT
        assert all(read(store, keys[:50]))
        for file in files:
            _damage(file, rng)
        assert not any(read(store, keys))
        assert store.counters["damaged"] == _COUNT
        assert store.describe().pages == 0
    with FileStore(tmp_path) as store:
        assert not any(read(store, keys))
        assert fill(store, range(_COUNT)) == keys
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
