"""The pages of one namespace: a folder with a file for each page.

A file gets its name when it is whole, and its content never changes. So a page is there or absent,
whenever a process ends. A loss of power can shorten a file that was not flushed; a file of another
length than the page's is absent. The time of modification says when the page was last written or
read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from hisparse.errors import one_line
from hisparse.private_files import PrivateFolder
from hisparse.storage.namespace import MAX_PAGE_BYTES, Namespace, check_key

_PAGE: Final = re.compile(r"[0-9a-f]{2,128}")
_TEXT: Final = "namespace.json"
#: A file that was written this many seconds ago and has no name yet is that of a killed process.
_ABANDONED_S: Final = 3600.0
#: Seconds for which a lookup believes an earlier one.
_SEEN_S: Final = 5.0
_BLOCK_BYTES: Final = 4096
#: In place of a time: there is no file of this name, or one that is no page; a put replaces it.
ABSENT, NO_PAGE = -1, -2
#: Bytes of a write. For more than 2 MiB at once ext4 looks for as much memory in one piece, which
#: makes a write ten times slower (Linux 6.18).
_PIECE_BYTES: Final = 1 << 20
#: Bytes of the checksum after a page.
DIGEST_BYTES: Final = 16


class DamagedError(Exception):
    """A file does not hold the page of its name; the message says why."""


def page_digest(namespace: str, key: str, page: memoryview) -> bytes:
    """xxh3_128 of both keys and the bytes: a page under another name is damaged."""
    digest = xxhash.xxh3_128(f"{namespace} {key} ".encode())
    digest.update(page)
    return digest.digest()


def read_page(fd: int, namespace: str, key: str, page: memoryview) -> None:
    """Read a page and its checksum from an open file.

    Raises:
        DamagedError: the file is short, or has other bytes.
        OSError: the system refuses.
    """
    digest = bytearray(DIGEST_BYTES)
    try:
        num_bytes = os.readv(fd, [page, digest])
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedError(one_line(error)) from None
    if num_bytes < len(page) + DIGEST_BYTES:
        raise DamagedError(f"got {num_bytes} bytes, expected {len(page) + DIGEST_BYTES}")
    check_page(namespace, key, page, digest)


def check_page(namespace: str, key: str, page: memoryview, digest: bytearray) -> None:
    """Raise DamagedError if a page does not have a checksum."""
    if digest != (expected := page_digest(namespace, key, page)):
        raise DamagedError(f"got checksum {digest.hex()}, expected {expected.hex()}")


def write_parts(fd: int, parts: Sequence[memoryview | bytes]) -> None:
    """Write parts one after the other to an open file.

    Raises:
        OSError: the system refuses, or the disk is full.
    """
    for part in parts:
        for first in range(0, len(part), _PIECE_BYTES):
            piece = part[first : first + _PIECE_BYTES]
            if os.write(fd, piece) < len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class PageFile(NamedTuple):
    """The file of a page: its key, its bytes, and when it was last used, in ns since 1970."""

    key: str
    num_bytes: int
    used_ns: int

    @property
    def page_bytes(self) -> int:
        """Bytes without the checksum, as far as a page may have them."""
        return min(max(0, self.num_bytes - DIGEST_BYTES), MAX_PAGE_BYTES)


def disk_bytes(file_bytes: int) -> int:
    """Bytes that a file takes on the disk: whole blocks, and one at least."""
    return max(1, -(-file_bytes // _BLOCK_BYTES)) * _BLOCK_BYTES


class PageFolder:
    """The pages of one namespace. Any thread may call its methods.

    Args:
        pages: the folder of all namespaces.
        namespace: key of this one.
        count: called with the bytes that each removal frees, as a negative number.

    Attributes:
        key: of the namespace.
    """

    def __init__(
        self, pages: PrivateFolder, namespace: str, count: Callable[[int], object]
    ) -> None:
        self.key, self._count, self._is_named = namespace, count, False
        #: Pages that lookups have found, until a time of the monotonic clock.
        self._seen, self._seen_until = set[str](), 0.0
        self._folder = PrivateFolder(pages.path / namespace, parent=pages, or_roots=True)

    def find(self, keys: Iterable[str], page_bytes: int, expired_ns: float) -> int:
        """Number of pages up to the first that is absent, or not used after ``expired_ns``.

        Servers repeat the lookups of requests that wait. So pages that were there some seconds ago
        are not looked for again; another process may have removed one.
        """
        now, found = time.monotonic(), 0
        if now > self._seen_until:
            self._seen, self._seen_until = set(), now + _SEEN_S
        seen = self._seen
        for key in keys:
            if key not in seen or expired_ns >= 0:
                name = check_key(key)
                if self.used_ns(name, page_bytes) <= expired_ns:
                    break
                seen.add(name)
            found += 1
        return found

    def used_ns(self, key: str, page_bytes: int | None) -> int:
        """When a page was last used, in nanoseconds since 1970; :data:`ABSENT`, or :data:`NO_PAGE`.

        A file is no page if it has another length than ``page_bytes`` say (None: any will do), is a
        link, or is of another user or open to others' writes.
        """
        try:
            about = os.stat(key, dir_fd=self._folder.fd, follow_symlinks=False)
        except OSError:
            self._seen.discard(key)
            return ABSENT
        is_page = page_bytes is None or about.st_size == page_bytes + DIGEST_BYTES
        if is_page and self._folder.is_private_file(about):
            return max(0, about.st_mtime_ns)
        self._seen.discard(key)
        return NO_PAGE

    def read(self, key: str, page: memoryview) -> None:
        """Read a page. A damaged one is removed.

        Raises:
            DamagedError: the file is short, or has other bytes.
            OSError: it is absent, or the system refuses.
        """
        fd = self._folder.open(key, os.O_RDONLY)
        try:
            read_page(fd, self.key, key, page)
        except DamagedError:
            self._seen.discard(key)
            # Another process may have replaced it meanwhile.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), os.lstat(key, dir_fd=self._folder.fd)):
                    self.remove(key)
            raise
        finally:
            os.close(fd)

    def write(self, key: str, page: memoryview, *, replace: bool) -> bool:
        """Store a page; False: it is there already.

        Args:
            page: its bytes.
            replace: put it in place of a file that is there.

        Raises:
            OSError: the system refuses; nothing is left of the page.
        """
        fd = self._folder.fd
        with self._written([page, page_digest(self.key, key, page)]) as new:
            self.note_use(new)
            old_bytes = 0
            try:
                if not replace:
                    os.link(new, key, src_dir_fd=fd, dst_dir_fd=fd)
                    return True
                old_bytes = disk_bytes(os.lstat(key, dir_fd=fd).st_size)
            except FileExistsError:
                return False
            except OSError:
                pass  # A file system without links, or another process has removed the file.
            os.replace(new, key, src_dir_fd=fd, dst_dir_fd=fd)
        with contextlib.suppress(OSError):  # A full disk; the next scan counts.
            self._count(-old_bytes)
        return True

    @contextlib.contextmanager
    def _written(self, parts: list[memoryview | bytes]) -> Iterator[str]:
        """The name of a new file inside the context."""
        name, fd = f"{secrets.token_hex(16)}.new", self._folder.fd
        file = self._folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                write_parts(file, parts)
            finally:
                os.close(file)
            yield name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)

    def note_use(self, name: str) -> None:
        """Note that a page is used now, more exactly than the system's own times are."""
        at = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(name, ns=(at, at), dir_fd=self._folder.fd)

    def remove(self, key: str) -> int:
        """Remove a page. Returns the bytes given back; 0: it was absent."""
        self._seen.discard(key)
        try:
            size = os.lstat(key, dir_fd=self._folder.fd).st_size
            os.unlink(key, dir_fd=self._folder.fd)
        except FileNotFoundError:
            return 0
        with contextlib.suppress(OSError):  # A full disk; the next scan counts.
            self._count(-disk_bytes(size))
        return disk_bytes(size)

    @property
    def is_writable(self) -> bool:
        """Whether pages can be removed, as far as the folder says."""
        return os.access(".", os.W_OK, dir_fd=self._folder.fd, effective_ids=True)

    def tighten(self) -> None:
        """Let nobody else look into the folder and its files."""
        self._folder.tighten()

    def scan(self) -> Iterator[PageFile]:
        """Every page, in no order. Files that killed processes have left are removed."""
        now = time.time()
        for entry in self._folder.entries():
            # A file may be removed meanwhile, and a folder may be read-only.
            with contextlib.suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if not entry.is_file(follow_symlinks=False):
                    continue
                if _PAGE.fullmatch(entry.name):
                    yield PageFile(entry.name, about.st_size, about.st_mtime_ns)
                elif entry.name.endswith(".new") and about.st_mtime < now - _ABANDONED_S:
                    os.unlink(entry.name, dir_fd=self._folder.fd)

    @property
    def namespace(self) -> Namespace | None:
        """What the pages have in common; None: the file that says it is lost or damaged."""
        try:
            with open(_TEXT, encoding="utf-8", opener=self._folder.open) as file:
                found = Namespace.parse(file.read())
        except (OSError, ValueError):  # ConfigError and UnicodeDecodeError are ValueErrors.
            return None
        return found if found.key == self.key else None

    def write_namespace(self, namespace: Namespace) -> None:
        """Say what the pages have in common, once in a process."""
        if not self._is_named and self.namespace is None:
            with self._written([namespace.text.encode()]) as new:
                os.replace(new, _TEXT, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
        self._is_named = True

    def close(self) -> None:
        """Let go of the folder."""
        self._folder.close()
