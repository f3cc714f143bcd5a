"""Other users of the machine: they read nothing of a store, write nothing, and stop nobody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.errors import ConfigError, HiSparseError
from hisparse.storage import FileStore
from tests.processes import NOBODY, as_nobody, folder_for_all, needs_root
from tests.storage.pages import NAMESPACE, contents, fill, key_of, page_file, page_files, read

_FOLDER = f"pages/{NAMESPACE.key}"


@pytest.fixture
def path() -> Iterator[Path]:
    """A store that is not there yet, in a folder that all users can look into."""
    with folder_for_all() as parent:
        yield parent / "store"


def _open(path: Path) -> FileStore:
    return FileStore(path, 1 << 30)


def _modes(path: Path) -> set[str]:
    """Kinds and modes of a store's folders and files."""
    found = [path, *path.rglob("*")]
    return {f"{'folder' if x.is_dir() else 'file'} {x.stat().st_mode & 0o7777:o}" for x in found}


def _refusal(path: Path) -> str:
    with pytest.raises(HiSparseError) as caught:
        _open(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_new_store_is_of_its_user_alone(path: Path) -> None:
    umask = os.umask(0)
    try:
        with FileStore(path / "new", 0.5) as store:
            fill(store, range(3))
            store.collect()
            assert _modes(path / "new") == {"folder 700", "file 600"}
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o755, "the folder above it"


def test_a_store_that_others_can_read_is_closed_to_them(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _open(path) as store:
        keys = fill(store, range(3))
    for each in (path, *path.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    with _open(path) as store:
        assert all(read(store, keys))
        assert _modes(path) == {"folder 700", "file 600"}
    (line,) = caplog.messages
    assert line.startswith(f"store {path}: others could read it; its folders have mode 700 now")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *[
            (".", 0o775),
            (".", 0o1777),
            ("pages", 0o757),
            ("hisparse.size", 0o666),
            (_FOLDER, 0o770),
        ],
        *[(name, "link") for name in ("hisparse.size", "pages", _FOLDER)],
        *[
            pytest.param(name, "owner", marks=needs_root)
            for name in (".", "pages", "hisparse.size", _FOLDER)
        ],
    ],
)
def test_others_could_have_written(path: Path, name: str, harm: int | str, tmp_path: Path) -> None:
    with _open(path) as store:
        keys = fill(store, range(3))
    target, mine, moved = path / name, tmp_path / "mine", tmp_path / "moved"
    mode = target.stat().st_mode & 0o7777 if target.exists() else 0
    if isinstance(harm, int):
        target.chmod(harm)
        what = f"can be written to by others (mode {harm:o}); expected mode"
        advice = (
            "remove it, name a new folder (also inside it), or, if you trust it, chmod -R go= it"
        )
    elif harm == "owner":
        os.chown(target, NOBODY, NOBODY)
        what = f"belongs to another user (uid {NOBODY}); expected your own"
        advice = "run as its owner, remove it, name a new folder (also inside it), or"
    else:
        if target.exists():
            target.rename(moved)
        mine.write_bytes(b"")
        target.symlink_to(mine)
        what, advice = "is a link; expected a file or folder of its own", "remove it"
    message = _refusal(path)
    assert f"{target} {what}" in message and advice in message
    if harm == "link":
        assert mine.read_bytes() == b""
        target.unlink()
        if moved.exists():
            moved.rename(target)
    else:
        os.chown(target, os.geteuid(), os.getegid())
        target.chmod(mode)
    with _open(path) as store:
        assert all(read(store, keys))


def test_a_page_that_others_could_have_written(path: Path) -> None:
    """It is absent: it is not read, a check names it and goes on, and a put replaces it."""
    with _open(path) as store:
        keys = fill(store, range(5))
        assert store.find(NAMESPACE, keys) == 5
    page_file(path, keys[0]).chmod(0o622)
    os.truncate(page_file(path, keys[4]), 7)
    with _open(path) as store:
        assert store.find(NAMESPACE, keys) == 0
        assert read(store, keys[:4]) == [False, True, True, True]
        reasons = {x.key: x.reason for x in store.verify().damaged}
        assert reasons.keys() == {keys[0], keys[4]} and "by others" in reasons[keys[0]]
        fill(store, [0, 4])
        assert all(read(store, keys)) and store.find(NAMESPACE, keys) == 5
        assert store.verify().damaged == ()


@pytest.mark.parametrize("name", ["page", "namespace.json"])
def test_a_file_that_is_a_link(path: Path, name: str, tmp_path: Path) -> None:
    """The user's file behind it stays as it is."""
    with _open(path) as store:
        keys = fill(store, range(2))
    file = page_file(path, keys[0] if name == "page" else name)
    mine = file.read_bytes()
    file.rename(tmp_path / "mine")
    file.symlink_to(tmp_path / "mine")
    for turn in range(2):
        with _open(path) as store:
            assert store.find(NAMESPACE, keys) == 2 * (name != "page" and not turn)
            assert read(store, keys) == [name != "page" and not turn, not turn]
            assert all(read(store, fill(store, range(10, 13))))
            store.collect()
            assert store.verify().damaged == ()
            store.remove(NAMESPACE)
        assert (tmp_path / "mine").read_bytes() == mine
    with _open(path) as store:
        assert all(read(store, fill(store, range(2)))) and not file.is_symlink()
    assert (tmp_path / "mine").read_bytes() == mine


def test_the_folder_may_be_a_link_to_another_disk(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path)
    with _open(path) as store:
        assert all(read(store, fill(store, range(3))))
    assert page_files(tmp_path)


def test_a_folder_with_other_files_stays_open_to_others(path: Path) -> None:
    """Such as /var/cache, given by mistake."""
    path.mkdir(mode=0o755)
    (path / "somebody").mkdir()
    assert "expected a new or empty folder, or a store" in _refusal(path)
    assert _modes(path) == {"folder 755"}


@pytest.mark.parametrize("create", [True, False])
def test_a_folder_with_pages_of_somebody_elses_is_no_store(path: Path, create: bool) -> None:
    (path / "pages").mkdir(parents=True)
    for name, mode in (("run.sh", 0o755), ("pages/a.txt", 0o644)):
        (path / name).touch()
        (path / name).chmod(mode)
    path.chmod(0o755)
    before = {x: x.stat().st_mode for x in path.rglob("*")}
    with pytest.raises((HiSparseError, ConfigError), match="expected .*folder"):
        FileStore(path, create=create)
    assert {x: x.stat().st_mode for x in path.rglob("*")} == before


@needs_root
def test_another_user_reads_and_locks_nothing(path: Path) -> None:
    with _open(path) as store:
        keys = fill(store, range(3))
        tried = [path, *path.rglob("*")]
        for each in tried:
            assert as_nobody(lambda x=each: os.open(x, os.O_RDONLY)).startswith("PermissionError")
        assert "Permission denied" in as_nobody(lambda: _open(path))
        with _open(path) as other:
            assert all(read(other, keys))


@needs_root
def test_a_store_of_root_that_a_user_can_only_read(path: Path) -> None:
    """As on a medium that is mounted for reading. Of a third user it would not be taken."""
    with _open(path) as store:
        keys = fill(store, range(3))
    files = [path, *path.rglob("*")]
    for each in files:
        each.chmod(0o755 if each.is_dir() else 0o644)
    before = {each: each.stat().st_mtime_ns for each in files}

    def use() -> object:
        with _open(path) as store:
            put = store.put(NAMESPACE, key_of(9), contents(key_of(9)))
            return read(store, keys), put

    assert as_nobody(use) == "([True, True, True], False)"
    assert {each: each.stat().st_mtime_ns for each in [path, *path.rglob("*")]} == before
    os.chown(path, NOBODY - 1, NOBODY - 1)
    assert "belongs to another user" in as_nobody(use)


def test_a_file_of_somebody_elses_named_size(path: Path) -> None:
    """It makes no store, and stays as it is in one."""
    path.mkdir(mode=0o700)
    (path / "size").write_bytes(b"my notes")
    with pytest.raises(ConfigError, match="expected the folder of a store"):
        FileStore(path, create=False)
    with _open(path) as store:
        assert all(read(store, fill(store, range(3))))
        store.collect()
    assert (path / "size").read_bytes() == b"my notes"
