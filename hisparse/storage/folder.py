"""The folder of a store.

::

    pages/NAMESPACE/PAGE              the bytes of a page, then their checksum; see pages.py
    pages/NAMESPACE/namespace.json    the text of the namespace
    pages/NAMESPACE/*.new             a file that is being written
    contexts.sqlite                   see contexts.py
    size                              bytes of all pages (int64, little-endian)

NAMESPACE and PAGE are keys, in hexadecimal.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.private_files import NotPrivateError, PrivateFolder
from hisparse.storage.contexts import contexts_path
from hisparse.storage.namespace import Namespace
from hisparse.storage.pages import PageFile, PageFolder, disk_bytes

logger = logging.getLogger(__name__)

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_SIZE: Final = "size"
#: Names in the folder of a store.
_STORE_NAMES: Final = re.compile(r"(pages|size|contexts\.sqlite(-\w+)?)")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def sync_file_system(fd: int) -> None:
    """Write to the disk what was written to the file system of an open file.

    Raises:
        OSError: the disk refuses.
    """
    if _LIBC.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class StoreFolder:
    """The folder of a store, open. Any thread may call its methods.

    Args:
        path: the folder.
        create: make it if it is absent.

    Attributes:
        path: the folder.
        read_only: whether nothing can be written.

    Raises:
        ConfigError: ``create`` is False and there is no store.
        HiSparseError: the folder can be neither made nor read, or others can write to it.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self._folders: dict[str, PageFolder] = {}
        self._lock, self._size_fd = threading.Lock(), -1
        try:
            self.path = path.expanduser().absolute()
            if not create and not self._is_store():
                raise ConfigError(f"got {quoted(str(path))}, expected the folder of a store")
            self._open()
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            # ValueError and RuntimeError: no name of a file, and no such user.
            reason = str(error) if isinstance(error, NotPrivateError) else one_line(error)
            raise HiSparseError(f"store {quoted(str(path))}: {reason}") from None

    def _is_store(self) -> bool:
        """Whether a store has made the folder: other folders may have one named pages."""
        pages = self.path / "pages"
        names = os.listdir(pages) if pages.is_dir() else []
        return (self.path / _SIZE).exists() or any(map(_NAMESPACE.fullmatch, names))

    def _open(self) -> None:
        root = PrivateFolder(self.path, or_roots=True)
        if root.is_open_to_others():
            names = {entry.name for entry in root.entries()}
            if not self._is_store() and not all(map(_STORE_NAMES.fullmatch, names)):
                raise NotPrivateError(
                    f"{self.path} has other files, and others can read it; expected a new or empty "
                    "folder, or a store: give the store a folder of its own"
                )
            root.tighten()
            logger.warning("store %s: others could read it; its mode is 700 now", self.path)
        self._pages = PrivateFolder(self.path / "pages", parent=root, or_roots=True)
        self.read_only = root.read_only or self._pages.read_only
        for _ in self.folders():
            pass  # Others could have written to one of them.
        if not self.read_only:
            self._size_fd = root.open(_SIZE, os.O_RDWR | os.O_CREAT)
            if not os.fstat(self._size_fd).st_size:
                self.add_bytes(sum(disk_bytes(page.num_bytes) for _, page in self.scan()))

    def folder(self, namespace: str) -> PageFolder | None:
        """The pages of the namespace with this key; None: there are none yet.

        Raises:
            OSError: the folder cannot be opened.
        """
        with self._lock:
            known = namespace in self._folders
            if not known and not (self._pages.path / namespace).is_dir():
                return None
            return self._open_folder(namespace)

    def make_folder(self, namespace: Namespace) -> PageFolder:
        """The pages of a namespace, whose folder is made if it is absent.

        Raises:
            OSError: it can be neither made nor opened.
        """
        with self._lock:
            folder = self._open_folder(namespace.key)
            folder.write_namespace(namespace)
            return folder

    def _open_folder(self, namespace: str) -> PageFolder:
        if namespace not in self._folders:
            self._folders[namespace] = PageFolder(self._pages, namespace)
        return self._folders[namespace]

    def folders(self, namespace: str | None = None) -> Iterator[PageFolder]:
        """The folders of all namespaces, or of one by its key, each open until the next."""
        for name in sorted(entry.name for entry in self._pages.entries()):
            if not _NAMESPACE.fullmatch(name) or namespace not in (None, name):
                continue
            if name in self._folders:
                yield self._folders[name]
            else:
                with contextlib.closing(PageFolder(self._pages, name)) as folder:
                    yield folder

    def scan(self, namespace: str | None = None) -> Iterator[tuple[PageFolder, PageFile]]:
        """Every page of every namespace, or of one."""
        for folder in self.folders(namespace):
            for page in folder.scan():
                yield folder, page

    def remove_unused(self, until_ns: float, namespace: str | None = None) -> tuple[int, int]:
        """Remove pages that nobody has used after a time, in nanoseconds since 1970.

        Args:
            until_ns: the time.
            namespace: key of their namespace; None: of all.

        Returns:
            How many there were, and the bytes given back.
        """
        num_pages = num_bytes = 0
        for folder, page in self.scan(namespace):
            if page.used_ns <= until_ns:
                given_back = folder.remove(page.key)
                num_bytes += given_back
                num_pages += given_back > 0
        self.add_bytes(-num_bytes)
        return num_pages, num_bytes

    def add_bytes(self, change: int) -> int:
        """Change the bytes of all pages, which the processes of a store count together.

        Returns:
            Bytes of all pages now.
        """
        # A lock of the file does not keep threads apart.
        with self._lock:
            fcntl.flock(self._size_fd, fcntl.LOCK_EX)
            try:
                before = int.from_bytes(os.pread(self._size_fd, 8, 0), "little")
                total = min(max(0, before + change), 2**63)
                os.pwrite(self._size_fd, total.to_bytes(8, "little"), 0)
            finally:
                fcntl.flock(self._size_fd, fcntl.LOCK_UN)
        return total

    @property
    def context_bytes(self) -> int:
        """Bytes of the contexts, which the size of a store limits as well."""
        try:
            return os.stat(contexts_path(self.path)).st_size
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def evicting(self) -> Iterator[bool]:
        """A context that is True if no other thread or process is in it."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._pages.fd)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                alone = False
            yield alone
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Write to the disk what was written to files."""
        sync_file_system(self._pages.fd)

    def close(self) -> None:
        """Let go of all files."""
        for folder in self._folders.values():
            folder.close()
        self._pages.close()
        if self._size_fd >= 0:
            os.close(self._size_fd)
            self._size_fd = -1
