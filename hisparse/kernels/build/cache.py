"""Files of the kernel cache, each with its digest: a damaged library may end the process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CACHE", "is_intact", "locked", "private_folder", "put", "unfinished"]

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
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.stat()  # The folder may be a link to another disk; that disk's folder counts.
    if about.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to another user (uid {about.st_uid}); expected your own folder "
            f"(uid {os.geteuid()}): remove it, or set HOME"
        )
    mode = stat.S_IMODE(about.st_mode)
    if mode & 0o022:
        raise PermissionError(
            f"{path} can be written to by others (mode {mode:o}), who may have put libraries "
            "there; expected mode 700: remove it, it is built again"
        )
    if mode != 0o700:
        with contextlib.suppress(OSError):  # A file system that nobody writes to.
            path.chmod(0o700)


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
        path: the file.
        on_wait: called if another one is producing it.
    """
    with open(path.with_suffix(".lock"), "w", opener=_open) as lock:
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
    with open(path, "rb", opener=_open) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of this user")
        return file.read()


def _open(path: str, flags: int) -> int:
    # Without waiting: a pipe of this name would have no end.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
