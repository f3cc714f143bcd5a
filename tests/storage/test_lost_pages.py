"""Damaged and lost files: a page is whole or absent, and nothing else is lost."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.errors import HiSparseError
from hisparse.storage import FileStore, folder
from tests.storage.pages import NAMESPACE, fill, key_of, page_file, page_files, read


def _filled(path: Path, count: int) -> list[str]:
    with FileStore(path, 1 << 30) as store:
        return fill(store, range(count))


def _damaged(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A file with a change, cut, or with another page's content, as a wrong sector gives."""
    changed, at = bytearray(data), rng.randrange(len(data))
    end = min(len(data), at + rng.randrange(1, 200))
    change = rng.randrange(5)
    if change == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif change == 1:
        changed[at:end] = bytes(end - at)
    elif change == 2:
        changed[at:end] = rng.randbytes(end - at)
    elif change == 3:
        return bytes(changed[:at])
    else:
        return other
    if changed == data:
        changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "in use"])
def test_damaged_pages_give_no_wrong_byte(is_open: bool, tmp_path: Path) -> None:
    """They are counted, and can be put again."""
    count, rng, keys = 165, random.Random(0), _filled(tmp_path, 165)
    broken = set(rng.sample(range(count), count * 10 // 11))
    store = FileStore(tmp_path) if is_open else None
    assert store is None or all(read(store, keys))
    files = [page_file(tmp_path, key) for key in keys]
    whole = [file.read_bytes() for file in files]
    for number in broken:
        other = whole[(number + 1) % count]
        files[number].write_bytes(_damaged(rng, whole[number], other))
    expected = [number not in broken for number in range(count)]
    with store or FileStore(tmp_path) as store:
        for _ in range(2):
            assert read(store, keys) == expected
            assert store.counters["damaged"] == len(broken) == count * 10 // 11
        assert store.describe().pages == sum(expected)
        fill(store, sorted(broken))
        assert all(read(store, keys))


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    keys = _filled(tmp_path, 10)
    for number, size in ((3, None), (5, 10), (7, 0), (8, 1 << 20)):
        file = page_file(tmp_path, keys[number])
        if size is None:
            file.write_bytes(b"\1" + file.read_bytes()[1:])
        else:
            os.truncate(file, size)
    with FileStore(tmp_path) as store:
        report = store.verify()
        assert report.pages == 10
        found = {x.key: x.reason for x in report.damaged}
        assert {key: reason[:12] for key, reason in found.items()} == {
            keys[3]: "got checksum", keys[5]: "got 10 bytes", keys[7]: "got 0 bytes,",
            keys[8]: "got checksum",
        }  # fmt: skip
        assert {x.namespace for x in report.damaged} == {NAMESPACE.key}
        assert store.verify().damaged == ()
        assert store.describe().pages == 6


def test_the_log_has_one_line_a_minute_and_a_total(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad disk fills no log."""
    with FileStore(tmp_path, 1 << 30) as store:
        keys = fill(store, range(9))
        for key in keys[1:6]:
            os.truncate(page_file(tmp_path, key), 100)
        page_file(tmp_path, keys[6]).unlink()
        assert read(store, keys) == [True, *[False] * 6, True, True]
        assert store.counters["damaged"] == 5
    line, total = caplog.messages
    assert f"page {keys[1]} is dropped: got 100 bytes, expected " in line
    assert "5 damaged pages were dropped" in total


@pytest.mark.parametrize(
    ("number", "damaged"), [(errno.EIO, True), (errno.EMFILE, False)], ids=["disk", "system"]
)
def test_a_page_that_the_system_does_not_read(
    number: int, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped if the disk fails, and else kept."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    (key,) = _filled(tmp_path, 1)
    with FileStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "readv", refuse)
            assert read(store, [key]) == [False]
        assert (store.counters["damaged"], store.counters["read_errors"]) == (damaged, not damaged)
        assert read(store, [key]) == [not damaged]


def test_a_page_that_was_replaced_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = _filled(tmp_path, 1)
    file, readv = page_file(tmp_path, key), os.readv
    whole = file.read_bytes()
    file.write_bytes(b"x")

    def slowly(*args: object) -> int:
        count = readv(*args)
        monkeypatch.undo()
        file.unlink()
        file.write_bytes(whole)
        file.chmod(0o600)
        return count

    monkeypatch.setattr(os, "readv", slowly)
    with FileStore(tmp_path) as store:
        assert read(store, [key]) == [False]
        assert read(store, [key]) == [True]


@pytest.mark.parametrize(
    "lose", [Path.unlink, lambda x: x.write_bytes(b""), lambda x: x.write_bytes(b"\xff{")]
)
@pytest.mark.parametrize("name", ["hisparse.size", f"pages/{NAMESPACE.key}/namespace.json"])
def test_other_files_are_made_again(
    name: str, lose: Callable[[Path], object], tmp_path: Path
) -> None:
    keys = _filled(tmp_path, 20)
    lose(tmp_path / name)
    with FileStore(tmp_path, 1 << 30) as store:
        assert store.find(NAMESPACE, keys) == 20
        assert all(read(store, fill(store, [30])))
        store.collect()
        assert store.describe().namespaces[0].pages == 21


def test_a_folder_that_is_deleted_while_the_store_is_open(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 30) as store:
        keys = fill(store, range(3))
        for file in (tmp_path / "pages" / NAMESPACE.key).iterdir():
            file.unlink()
        (tmp_path / "pages" / NAMESPACE.key).rmdir()
        assert store.find(NAMESPACE, keys) == 0 and not any(read(store, keys))
        assert not store.put(NAMESPACE, key_of(9), b"x" * NAMESPACE.page_bytes)
        assert store.counters["refused_disk"] == 1
    with FileStore(tmp_path) as store:
        assert all(read(store, fill(store, range(3))))


def test_other_files_are_no_pages(tmp_path: Path) -> None:
    keys = _filled(tmp_path, 2)
    place = tmp_path / "pages" / NAMESPACE.key
    (tmp_path / "pages" / "notes").mkdir()
    (place / "ab").mkdir()
    others = [place / "copy of a page", place / f"{keys[0]}.old", place / keys[0].upper()]
    for other in others:
        other.write_bytes(page_file(tmp_path, keys[0]).read_bytes())
    with FileStore(tmp_path) as store:
        assert store.verify().pages == store.describe().pages == 2
        assert store.remove() == 2
    assert all(other.exists() for other in others)
    assert page_files(tmp_path)


def test_a_flush_is_told_when_it_fails_and_reaches_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced, broken = folder.sync_file_system, [], [True]

    def sometimes(fd: int) -> None:
        if broken.pop() if broken else False:
            raise OSError(errno.EIO, "Input/output error")
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(folder, "sync_file_system", sometimes)
    with FileStore(tmp_path) as store:
        fill(store, range(4))
        with pytest.raises(HiSparseError, match=r"^store '.*': got OSError: .*Input/output error"):
            store.flush()
        store.flush()
        assert synced == [str(tmp_path / "pages")]
    with pytest.raises(OSError, match="Bad file descriptor"):
        sync(-1)


@pytest.mark.parametrize("size", [0, 4096, NAMESPACE.page_bytes + 17])
def test_files_that_a_loss_of_power_has_shortened(size: int, tmp_path: Path) -> None:
    """They are absent to a lookup, and a put replaces them."""
    keys = _filled(tmp_path, 5)
    for key in keys[2:]:
        os.truncate(page_file(tmp_path, key), size)
    with FileStore(tmp_path) as store:
        assert store.find(NAMESPACE, keys) == 2
        assert fill(store, range(2, 5)) == keys[2:]
        assert store.find(NAMESPACE, keys) == 5 and all(read(store, keys))
        assert store.counters["damaged"] == 0
    with FileStore(tmp_path) as store:
        store.collect()
        assert store._folder.add_bytes(0) == store.describe().bytes


def test_a_store_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """Whatever its mode is; nothing in it changes."""
    for name in ("segments", "index.sqlite"):
        path = tmp_path / name / "store"
        (path / name).mkdir(parents=True)
        path.chmod(0o755)
        for create in (True, False):
            with pytest.raises(
                HiSparseError, match=f"^store .* an earlier version .{name}.* delete"
            ):
                FileStore(path, create=create)
        assert os.listdir(path) == [name] and path.stat().st_mode & 0o777 == 0o755
