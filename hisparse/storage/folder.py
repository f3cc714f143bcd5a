"""The folder of a store.

::

    pages/NAMESPACE/PAGE              the bytes of a page, then their checksum; see pages.py
    pages/NAMESPACE/namespace.json    the text of the namespace
    pages/NAMESPACE/*.new             a file that is being written
    hisparse.size                     bytes of all pages, as a sum

NAMESPACE and PAGE are keys, in hexadecimal.

The numbers of ``hisparse.size`` are pairs of int64, little-endian: bytes added and removed. Each
process appends a pair of its own. The first pair corrects the sum after a scan of all files; only
the process that evicts changes it. So nobody locks the file or waits for it.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import numpy as np

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.private_files import NotPrivateError, PrivateFolder
from hisparse.storage.namespace import Namespace
from hisparse.storage.pages import PageFile, PageFolder

logger = logging.getLogger(__name__)

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_SIZE: Final = "hisparse.size"
#: Names in the folder of a store, and in those of earlier versions.
_STORE_NAMES: Final = re.compile(r"(pages|hisparse\.size|contexts\.sqlite(-\w+)?)")
_OLD_NAMES: Final = ("segments", "index.sqlite")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def sync_file_system(fd: int) -> None:
    """Write to the disk what was written to the file system of an open file.

    Raises:
        OSError: the disk refuses.
    """
    if _LIBC.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def system_error(path: Path, error: Exception) -> HiSparseError:
    """What the system said about the folder of a store, as an error of ours."""
    return HiSparseError(
        f"store {quoted(str(path))}: got {one_line(error)}; expected a folder that can be made, "
        "read and written to"
    )


class StoreFolder:
    """The folder of a store, open. Any thread may call its methods.

    Args:
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
        self._lock, self._size_lock = threading.Lock(), threading.Lock()
        #: What this process has added and removed, and where in the file it says so.
        self._added, self._removed, self._place = 0, 0, 0
        self._size_fd = -1
        try:
            self.path = path.expanduser().absolute()
            if old := [name for name in _OLD_NAMES if (self.path / name).exists()]:
                raise ConfigError(
                    f"store {quoted(str(path))}: got a store of an earlier version ({old[0]}), "
                    "expected a new folder or a store of this version: end the old servers, and "
                    "delete the folder"
                )
            if not create and not self._is_store():
                raise ConfigError(f"got {quoted(str(path))}, expected the folder of a store")
            self._open()
        except ConfigError:
            raise
        except NotPrivateError as error:
            raise HiSparseError(f"store {quoted(str(path))}: {error}") from None
        except (OSError, ValueError, RuntimeError) as error:
            # ValueError and RuntimeError: no name of a file, and no such user.
            raise system_error(path, error) from None

    def _is_store(self) -> bool:
        """Whether a store has made the folder: other folders may have one named pages."""
        pages = self.path / "pages"
        names = os.listdir(pages) if pages.is_dir() else []
        return (self.path / _SIZE).exists() or any(map(_NAMESPACE.fullmatch, names))

    def _open(self) -> None:
        self._root = root = PrivateFolder(self.path, or_roots=True)
        if is_open := root.is_open_to_others():
            names = {entry.name for entry in root.entries()}
            if not self._is_store() and not all(map(_STORE_NAMES.fullmatch, names)):
                raise NotPrivateError(
                    f"{self.path} has other files, and others can read it; expected a new or empty "
                    "folder, or a store: give the store a folder of its own"
                )
            logger.warning(
                "store %s: others could read it; its folders have mode 700 now, its files mode 600",
                self.path,
            )
            root.tighten()
        self._pages = PrivateFolder(self.path / "pages", parent=root, or_roots=True)
        self.read_only = root.read_only or self._pages.read_only
        for folder in self.folders():  # Others could have written to one of them.
            if is_open:
                folder.tighten()
        if is_open:
            self._pages.tighten()
        if not self.read_only:
            self._open_size()

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
            self._folders[namespace] = PageFolder(self._pages, namespace, self.add_bytes)
        return self._folders[namespace]

    def folders(self, namespace: str | None = None) -> Iterator[PageFolder]:
        """The folders of all namespaces, or of one by its key, each open until the next."""
        for name in sorted(entry.name for entry in self._pages.entries()):
            if not _NAMESPACE.fullmatch(name) or namespace not in (None, name):
                continue
            if name in self._folders:
                yield self._folders[name]
            else:
                with contextlib.closing(PageFolder(self._pages, name, self.add_bytes)) as folder:
                    yield folder

    def scan(self) -> Iterator[tuple[PageFolder, PageFile]]:
        """Every page of every namespace."""
        for folder in self.folders():
            for page in folder.scan():
                yield folder, page

    def remove(
        self, leaves: Callable[[PageFile], bool], namespace: str | None = None
    ) -> tuple[int, int, OSError | None]:
        """Remove pages; one that cannot be removed stays, and the others leave.

        Args:
            leaves: whether a page is to leave.
            namespace: key of their namespace; None: of all.

        Returns:
            How many there were, the bytes given back, and the last error of the system.
        """
        num_pages, num_bytes, failed = 0, 0, None
        for folder in self.folders(namespace):
            for page in filter(leaves, folder.scan() if folder.is_writable else ()):
                try:
                    given_back = folder.remove(page.key)
                except OSError as error:
                    failed = error
                else:
                    num_bytes += given_back
                    num_pages += given_back > 0
        return num_pages, num_bytes, failed

    def add_bytes(self, change: int) -> int:
        """Count bytes that this process adds or removes.

        Returns:
            Bytes of all pages now, without changes that only a scan finds, until :meth:`correct`.
        """
        return int(np.subtract(*self.count(change)).astype("i8"))

    def count(self, change: int) -> np.ndarray:
        """As :meth:`add_bytes`. Returns ``[2] uint64``: bytes that all have added and removed."""
        with self._size_lock:
            fd = self._open_size()
            if not 0 < self._place <= os.fstat(fd).st_size - 16:
                with FileIO(self._root.open(_SIZE, os.O_RDWR | os.O_APPEND), "r+") as end:
                    # In a new file, the pair that corrects as well.
                    end.write(bytes(16 if os.fstat(fd).st_size >= 16 else 32))
                    self._place = end.tell() // 16 * 16 - 16
            added, removed = self._added + max(0, change), self._removed + max(0, -change)
            os.pwrite(fd, _to_bytes(added) + _to_bytes(removed), self._place)
            self._added, self._removed = added, removed
            data = os.pread(fd, os.fstat(fd).st_size // 16 * 16, 0)
        # Modulo 2^64, so that any content of the file can be corrected.
        sums: np.ndarray = np.frombuffer(data, "<u8").reshape(-1, 2).sum(0)
        return sums

    def correct(self, change: int) -> None:
        """Add to what :meth:`add_bytes` returns to any process; only inside of :meth:`evicting`."""
        with self._size_lock:
            before = int.from_bytes(os.pread(self._open_size(), 8, 0), "little")
            os.pwrite(self._open_size(), _to_bytes(before + change), 0)

    def _open_size(self) -> int:
        """The file of bytes, open; it may have been deleted and made again."""
        if self._size_fd < 0 or not os.fstat(self._size_fd).st_nlink:
            self._close_size()
            self._place = 0
            self._size_fd = self._root.open(_SIZE, os.O_RDWR | os.O_CREAT)
        return self._size_fd

    def __del__(self) -> None:
        self._close_size()

    def _close_size(self) -> None:
        fd, self._size_fd = self._size_fd, -1
        if fd >= 0:
            os.close(fd)

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
            if alone:  # A process that was forked meanwhile holds a copy of the descriptor.
                fcntl.flock(fd, fcntl.LOCK_UN)
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
        self._root.close()
        self._close_size()


def _to_bytes(number: int) -> bytes:
    return (number % 2**64).to_bytes(8, "little")
