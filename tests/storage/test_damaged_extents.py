"""Extents that are cut or flipped, each in a file of its own: absent, counted, and stored again."""

from __future__ import annotations

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


@pytest.mark.parametrize("in_use", [True, False], ids=["in use", "at rest"])
@pytest.mark.sweeps
def test_each_is_absent_and_counted(
    in_use: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store that has the files open, or in the next one that opens them."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # A thousand of them take long.
    rng = random.Random(0)
    with FileStore(tmp_path, segment_bytes=1) as store:
        keys = fill(store, range(_COUNT))
        files = segment_files(tmp_path)
        assert len(files) == _COUNT
        if in_use:
            assert all(read(store, keys[:50]))
            for file in files:
                _damage(file, rng)
            assert not any(read(store, keys))
            assert store.counters["damaged"] == _COUNT
            assert store.describe().pages == 0
    if not in_use:
        for file in files:
            _damage(file, rng)
    # The index forgets those of files that are too short when it is opened.
    whole = sum(file.stat().st_size == 3 * 4096 for file in segment_files(tmp_path))
    with FileStore(tmp_path) as store:
        assert not any(read(store, keys))
        assert in_use or store.counters["damaged"] == whole > _COUNT // 3
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
        database.close()
        assert store.collect(1.0) > 0
        assert read(store, keys) == [False, True, False]
        assert store.counters["damaged"] == 1
