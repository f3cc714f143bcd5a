"""Folders and files that no other user of the machine can read or change.

They hold compiled kernels and the K and V of prompts. A process must not load what another user has
put there, and another user must not read what the process writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Without waiting: a pipe of this name would have no end.
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotPrivateError(PermissionError):
    """A folder or file belongs to another user, can be written to by others, or is a link.

    The message is one line.
    """


def open_private(path: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a file with :func:`os.open`; a link is refused, and a new file has mode 600.

    It serves as the ``opener`` of :func:`open`.

    Raises:
        OSError: the system refuses; its number is ``ELOOP`` for a link.
    """
    return os.open(path, flags | _FLAGS, 0o600, dir_fd=dir_fd)


class PrivateFolder:
    """A folder of this user that nobody else can write to, open. Any thread may call its methods.

    Files are opened by their names in the open folder, so a folder that takes its place is never
    used. Links in it are refused. It is closed at the latest when the last reference to it is gone.

    Args:
        path: the folder, which may be a link to another disk: the folder there counts. It is made
            with mode 700 if it is absent, and missing ones above it with mode 755.
        parent: the folder that ``path`` is in; a link is then refused.
        or_roots: take a folder of root too, if this user cannot write to it.

    Attributes:
        path: the folder.
        fd: its descriptor; -1 once it is closed.
        read_only: whether this user cannot write to it. Others may then read it.

    Raises:
        NotPrivateError: another user owns it or can write to it, or it is a link.
        OSError: it can be neither made nor opened.
    """

    def __init__(
        self, path: Path, *, parent: PrivateFolder | None = None, or_roots: bool = False
    ) -> None:
        self.path, self.fd = path, -1
        if parent is not None:
            with contextlib.suppress(FileNotFoundError):
                parent._check(os.lstat(path), path)
        for missing in reversed([each for each in path.parents if not each.exists()]):
            missing.mkdir(mode=0o755, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if parent is None:
            self.fd = os.open(path, flags)
        else:
            self.fd = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=parent.fd)
        self.read_only = not os.access(".", os.W_OK, dir_fd=self.fd, effective_ids=True)
        self._owners = {os.geteuid(), 0} if or_roots and self.read_only else {os.geteuid()}
        self._check(os.fstat(self.fd), path)

    def close(self) -> None:
        """Close the folder; nothing can be opened in it any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def is_open_to_others(self) -> bool:
        """Whether others can look into a folder that this user can write to."""
        return not self.read_only and bool(os.fstat(self.fd).st_mode & 0o077)

    def tighten(self) -> None:
        """Let nobody else look into the folder, if others could, and into its files.

        Files that others could write to stay as they are, and are refused as before.

        Raises:
            OSError: the file system refuses.
        """
        if self.is_open_to_others():
            os.fchmod(self.fd, 0o700)
            for entry in self.entries():
                with contextlib.suppress(FileNotFoundError):
                    if self.is_private_file(entry.stat(follow_symlinks=False)):
                        os.chmod(entry.name, 0o600, dir_fd=self.fd)

    def is_private_file(self, about: os.stat_result) -> bool:
        """Whether :meth:`open` takes a file of which :func:`os.lstat` says this."""
        return about.st_mode & 0o170022 == stat.S_IFREG and about.st_uid in self._owners

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder; a new one has mode 600.

        Raises:
            NotPrivateError: another user owns it or can write to it, or it is a link.
            OSError: the system refuses.
        """
        path = self.path / name
        try:
            fd = open_private(name, flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._link_error(path) from None
            raise
        try:
            self._check(os.fstat(fd), path)
        except NotPrivateError:
            os.close(fd)
            raise
        return fd

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """What is in the folder; ``path`` of an entry is its name."""
        # Another descriptor: threads that share one would share its position.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            with os.scandir(fd) as found:
                yield from found
        finally:
            os.close(fd)

    def _check(self, about: os.stat_result, path: Path) -> None:
        is_folder, mode = stat.S_ISDIR(about.st_mode), stat.S_IMODE(about.st_mode)
        if stat.S_ISLNK(about.st_mode):
            raise self._link_error(path)
        if not is_folder and not stat.S_ISREG(about.st_mode):
            raise NotPrivateError(f"{path} is a pipe, socket or device; expected a file: remove it")
        if about.st_uid not in self._owners:
            raise NotPrivateError(
                f"{path} belongs to another user (uid {about.st_uid}); expected your own "
                f"{'folder' if is_folder else 'file'} (uid {os.geteuid()}): run as its owner, "
                "remove it, name a new folder (also inside it), or, if you trust it, chown -R it"
            )
        if mode & 0o022:
            raise NotPrivateError(
                f"{path} can be written to by others (mode {mode:o}); expected mode "
                f"{'700' if is_folder else '600'}: remove it, name a new folder (also inside it), "
                "or, if you trust it, chmod -R go= it"
            )

    @staticmethod
    def _link_error(path: Path) -> NotPrivateError:
        return NotPrivateError(f"{path} is a link; expected a file or folder of its own: remove it")
