"""A storage that fails is neither read nor written until it works again."""

import asyncio
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.kvcm import storages
from hisparse.kvcm.startup import default_startup
from hisparse.kvcm.storages import Storage, probe
from tests.kvcm.manager import Manager, ManagerError, path_of, store_bytes, wait_until


def _storage(root: Path) -> Storage:
    return Storage(1, default_startup(root, 1 << 20)[0], True)


def _probe(storage: Storage) -> bool:
    asyncio.run(probe(storage))
    return storage.available


def test_a_folder_that_is_lost_and_found(managers: Callable[..., Manager]) -> None:
    manager = managers()
    client = manager.http
    client.register()
    (uri,) = client.put([1])
    store_bytes(uri, b"x" * 64)
    probed = manager.root / ".kvcm-nfs_01"
    wait_until(probed.exists)
    away = manager.root.with_name("away")
    manager.root.rename(away)
    wait_until(lambda: client.match([1]) == [])
    with pytest.raises(ManagerError, match="no candidate with room"):
        client.write([2])
    told = client.metric("data_storage.is_available", storage="nfs_01")
    assert told == 0
    manager.root.mkdir()  # As below a file system that is mounted no more.
    (manager.root / "other").touch()
    shutil.rmtree(manager.root)
    away.rename(manager.root)
    wait_until(lambda: client.match([1]) == [uri])
    assert path_of(uri).exists()
    client.put([2])


def test_another_folder_in_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = _storage(tmp_path / "root")
    assert _probe(storage)  # Nobody made it yet.
    (tmp_path / "root").mkdir()
    assert _probe(storage) and storage.worked
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").mkdir()
    with caplog.at_level(logging.ERROR):
        assert not _probe(storage) and not _probe(storage)
    assert len(caplog.messages) == 1 and "storage nfs_01: FileNotFoundError" in caplog.text
    (tmp_path / "root").rmdir()
    (tmp_path / "away").rename(tmp_path / "root")
    assert _probe(storage)
    storage.enabled = False
    assert not _probe(storage)


def test_a_folder_that_is_lost_while_the_manager_is(
    managers: Callable[..., Manager], tmp_path: Path
) -> None:
    """The empty one below it is not taken for it, and no file counts as deleted there."""
    manager = managers(store=str(tmp_path / "db"))
    client = manager.http
    client.register()
    (uri,) = client.put([1])
    store_bytes(uri, b"x" * 64)
    wait_until((manager.root / ".kvcm-nfs_01").exists)
    time.sleep(1.2)  # Until a probe has told the store.
    manager.kill()
    away = manager.root.with_name("away")
    manager.root.rename(away)
    manager.root.mkdir()
    manager.start()
    client = manager.http
    wait_until(lambda: client.metric("data_storage.is_available", storage="nfs_01") == 0)
    assert client.match([1]) == []
    client.admin("removeInstance", instance_id="i")
    time.sleep(0.3)
    manager.root.rmdir()
    away.rename(manager.root)
    assert path_of(uri).exists()
    wait_until(lambda: not path_of(uri).exists())


@pytest.mark.parametrize(
    ("number", "first", "later"),
    [
        (errno.EIO, False, False),
        (errno.ESTALE, False, False),
        (errno.ENOSPC, True, True),
        (errno.EDQUOT, True, True),
        (errno.EACCES, True, False),
        (errno.EROFS, True, False),
    ],
)
def test_errors_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, first: bool, later: bool
) -> None:
    """Later: after it worked once."""

    def fail(*_: object) -> int:
        raise OSError(number, "no")

    new, used = _storage(tmp_path), _storage(tmp_path)
    assert _probe(used)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert (_probe(new), _probe(used)) == (first, later)
    assert _probe(new) and _probe(used)


def test_a_link_in_its_place(tmp_path: Path) -> None:
    """Who may write to the folder has no file of the manager's user written over."""
    storage = _storage(tmp_path / "root")
    (tmp_path / "root").mkdir()
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    (tmp_path / "root" / ".kvcm-nfs_01").symlink_to(kept)
    assert not _probe(storage)
    assert kept.read_text() == "as it was"


def test_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _storage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: b"")
        assert not _probe(storage)
    assert _probe(storage)


def test_a_folder_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One probe waits for it, and no second one."""
    storage, goes_on, calls = _storage(tmp_path), threading.Event(), list[int]()

    def hang(*_: object) -> None:
        calls.append(1)
        goes_on.wait()

    monkeypatch.setattr(storages, "_PROBE_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", hang)
        assert not _probe(storage) and not _probe(storage)
        assert len(calls) == 1
    goes_on.set()
    wait_until(lambda: not storage.is_probed)
    assert _probe(storage)
