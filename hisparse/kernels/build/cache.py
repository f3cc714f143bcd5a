"""Files of the kernel cache, each with its digest: a damaged library may end the process."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CACHE", "is_intact", "locked", "private_folder", "put"]

CACHE = Path.home() / ".cache" / "hisparse" / "kernels"


def is_intact(path: Path) -> bool:
    """Whether the file is there and has the digest that was stored with it."""
    try:
        return _digest_path(path).read_text() == _digest(path)
    except OSError:
        return False


def put(partial: Path, path: Path) -> None:
    """Move a finished file to its place; a reader never sees it half-written or without digest."""
    digest = partial.with_name(partial.name + ".sha256")
    digest.write_text(_digest(partial))
    path.unlink(missing_ok=True)
    digest.replace(_digest_path(path))
    partial.replace(path)


def private_folder(path: Path) -> None:
    """Make a folder that only this user can enter: its libraries are loaded and run.

    Raises:
        OSError: another user owns it, or it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user; expected your own folder")
    path.chmod(0o700)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes and threads from producing the same file; a killed one lets go."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
