"""Files of the kernel cache, each with its digest: a damaged library may end the process."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hisparse.private_files import PrivateFolder, open_private

CACHE = Path.home() / ".cache" / "hisparse" / "kernels"


def is_intact(path: Path) -> bool:
    """Whether the file is there, is this user's, and has the digest that was stored with it."""
    try:
        return _read(_digest_path(path)) == _digest(path).encode()
    except OSError:
        return False


def put(finished: Path, path: Path) -> None:
    """Move a finished file to its place; a reader never sees it half-written or without digest."""
    digest = _digest_path(finished)
    digest.write_text(_digest(finished))
    digest.replace(_digest_path(path))
    finished.replace(path)


def private_folder(path: Path) -> None:
    """Make a folder that only this user can enter: its libraries are loaded and run.

    Raises:
        OSError: another user owns it or can write to it, or it cannot be made.
    """
    folder = PrivateFolder(path)
    with contextlib.suppress(OSError):  # A file system without modes.
        folder.tighten()


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A folder for what is not finished of a file that this process has locked; removed at the end.

    What a killed builder left is removed first. Its compilers, which may still run, cannot write
    here: each builder has a folder of its own.
    """
    for old in path.parent.glob(f"{path.stem}.unfinished-*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{path.stem}.unfinished-", dir=path.parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keep other processes and threads from producing the same file; a killed one lets go.

    Args:
        on_wait: called if another one is producing it.
    """
    with open(path.with_suffix(".lock"), "w", opener=open_private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    """Bytes of a file of this user; a link, which may lead to another's, is not followed."""
    with open(path, "rb", opener=open_private) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError(f"got {path} of another user, expected your own: remove it")
        return file.read()
