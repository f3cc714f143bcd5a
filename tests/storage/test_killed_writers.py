"""SIGKILL at chosen moments: what was acknowledged is there and whole, and the store goes on.

``test_random_faults.py`` kills at random times. Here a process ends at each step of a put and of an
eviction, where random times seldom hit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse.storage import FileStore
from hisparse.storage.folder import StoreFolder
from hisparse.storage.pages import PageFolder
from tests.processes import die, run_killed
from tests.storage.pages import (
    DISK_BYTES,
    NAMESPACE,
    contents,
    disk_bytes,
    fill,
    key_of,
    page_files,
    read,
)

Patch = Callable[[], None]


def _before(owner: Any, name: str, after: int = 0) -> Patch:
    """Die at a call of a function, or after it returned; ``after`` counts the calls before."""
    return _patched(owner, name, after, before=True)


def _behind(owner: Any, name: str, after: int = 0) -> Patch:
    return _patched(owner, name, after, before=False)


def _patched(owner: Any, name: str, after: int, *, before: bool) -> Patch:
    def patch() -> None:
        original, left = getattr(owner, name), [after]

        def dying(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if before and left[0] < 0:
                die()
            result = original(*args, **options)
            if left[0] < 0:
                die()
            return result

        setattr(owner, name, dying)

    return patch


def _half_written(num_bytes: int) -> Patch:
    """Die when the disk has so many bytes of a page."""

    write, left = os.write, [num_bytes]

    def dying(fd: int, data: memoryview) -> int:
        left[0] -= write(fd, data[: left[0]])
        if left[0] <= 0 or len(data) < 100:
            die()
        return len(data)

    def patch() -> None:
        os.write = dying

    return patch


def _check(path: Path, keys: list[str], unsure: list[str]) -> None:
    """``keys`` are there, others can be put, and what the killed process left is removed."""
    with FileStore(path) as store:
        assert all(read(store, keys)), "an acknowledged page is lost"
        read(store, unsure)
        keys = keys + fill(store, range(500, 505))
        assert store.verify().damaged == ()
        for left in path.glob("pages/*/*.new"):
            os.utime(left, (0, 0))
        store.collect()
        assert not list(path.glob("pages/*/*.new"))
        assert store._folder.add_bytes(0) == disk_bytes(path)
    with FileStore(path) as store:
        assert all(read(store, keys))
        assert store.describe().namespaces[0].namespace == NAMESPACE


@pytest.mark.parametrize(
    "patch",
    [
        *[pytest.param(_half_written(n), id=f"after {n} bytes") for n in (0, 1, 5010, 1 << 20)],
        pytest.param(_before(os, "link"), id="before the name"),
        pytest.param(_before(os, "unlink"), id="with two names"),
        pytest.param(_before(StoreFolder, "make_folder"), id="before the folder"),
        pytest.param(_behind(StoreFolder, "add_bytes"), id="counted only"),
        pytest.param(_behind(PageFolder, "write"), id="before the acknowledgement"),
    ],
)
@pytest.mark.parametrize("done", [0, 5])
def test_a_writer(tmp_path: Path, patch: Patch, done: int) -> None:
    def put(acknowledge: Callable[[], None]) -> None:
        store = FileStore(tmp_path)
        for number in range(done + 10):
            if number == done:
                patch()
            if store.put(NAMESPACE, key_of(number), contents(key_of(number))):
                acknowledge()

    acknowledged = run_killed(put)
    assert acknowledged == done
    keys = [key_of(number) for number in range(acknowledged)]
    _check(tmp_path, keys, [key_of(acknowledged)])


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(_behind(PageFolder, "remove", after=2), id="some are gone"),
        pytest.param(_before(StoreFolder, "add_bytes", after=2), id="not counted"),
    ],
)
def test_an_eviction(tmp_path: Path, patch: Patch) -> None:
    """Some of the pages that were to leave are gone, and the others are whole."""
    with FileStore(tmp_path) as store:
        keys = fill(store, range(30))

    def evict(_: Callable[[], None]) -> None:
        store = FileStore(tmp_path, 20 * DISK_BYTES)
        patch()
        store.collect()

    run_killed(evict)
    with FileStore(tmp_path, 20 * DISK_BYTES) as store:
        assert 0 < sum(read(store, keys)) < 30
        store.collect()
        assert disk_bytes(tmp_path) <= 20 * DISK_BYTES
    _check(tmp_path, [file.name for file in page_files(tmp_path)], [])
