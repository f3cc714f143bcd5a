"""Segments: the large files that records are appended to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hisparse.private_files import NotPrivateError, PrivateFolder
from hisparse.storage.namespace import BLOCK_BYTES, Header, read_header

logger = logging.getLogger(__name__)

#: Names of segments. Larger numbers do not fit SQLite.
SEGMENT_NAME: Final = re.compile(r"([0-7][0-9a-f]{15})\.seg")
#: Files that readers keep open.
_MAX_OPEN: Final = 128
#: Sealed files that wait for a flush; by then the system has written most of them.
_MAX_UNSYNCED: Final = 4


class RecordPlace(NamedTuple):
    """Where a record is: the number of its segment, and its offset in bytes."""

    segment: int
    offset: int


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Call ``os.preadv`` or ``os.pwritev`` until all views are done, or the file ends.

    Returns the bytes done.
    """
    left, total = list(views), 0
    while left and (done := call(fd, left, offset + total)):
        total += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
    return total


class OpenSegment:
    """A segment open for reading, closed when the last thread lets go of it.

    It gives no descriptor away: once it is closed, the number may be that of another file.
    """

    def __init__(self, folder: PrivateFolder, name: str) -> None:
        self._fd = folder.open(name, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill views from ``offset`` on. Returns the bytes read, fewer at the end of the file."""
        return transfer(os.preadv, self._fd, views, offset)

    def headers(self, start: int) -> Iterator[tuple[int, Header]]:
        """Offset and header of each whole record from the block at ``start`` on."""
        size, offset = self.num_bytes, start - start % BLOCK_BYTES
        while offset + BLOCK_BYTES <= size:
            header = read_header(os.pread(self._fd, BLOCK_BYTES, offset))
            if header is None or offset + header.num_bytes > size:
                offset += BLOCK_BYTES
                continue
            yield offset, header
            offset += header.num_bytes


class Segments:
    """The segments of a folder. Its methods may be called from any thread."""

    def __init__(self, folder: PrivateFolder) -> None:
        self.folder = folder
        self._open: OrderedDict[int, OpenSegment] = OrderedDict()
        self._lock = threading.Lock()
        #: Names of other files, each of which is told once.
        self._strays: set[str] = set()

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self.folder.path / f"{segment:016x}.seg"

    def sizes(self) -> dict[int, int]:
        """Number and bytes of each segment, the oldest first."""
        # By inode: a file that is renamed meanwhile may be listed twice.
        found = {}
        for entry in self.folder.entries():
            # A file may be deleted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                is_file = entry.is_file(follow_symlinks=False)
                if (name := SEGMENT_NAME.fullmatch(entry.name)) and is_file:
                    size = entry.stat(follow_symlinks=False).st_size
                    found[entry.inode()] = int(name[1], 16), size
                elif entry.name not in self._strays:
                    self._strays.add(entry.name)
                    stray = self.folder.path / entry.name
                    logger.warning("%s is no segment of a store and is ignored", stray)
        return dict(sorted(found.values()))

    def open(self, segment: int, *, fresh: bool = False) -> OpenSegment:
        """Open a segment, or find it open; ``fresh``: open the file again also then."""
        with self._lock:
            if (found := None if fresh else self._open.get(segment)) is None:
                found = self._open[segment] = OpenSegment(self.folder, self.path(segment).name)
            self._open.move_to_end(segment)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            return found

    def locked(self, segment: int) -> contextlib.AbstractContextManager[bool]:
        """A context that is True if no process is writing the segment; none does inside."""
        return locked(self.folder, self.path(segment).name)

    def busy(self) -> list[int]:
        """The segments that a process is writing."""
        found = []
        for segment in self.sizes():
            with self.locked(segment) as free:
                if not free:
                    found.append(segment)
        return found

    def truncate(self, segment: int, num_bytes: int) -> None:
        """Cut or extend a file."""
        fd = self.folder.open(self.path(segment).name, os.O_WRONLY)
        try:
            os.ftruncate(fd, num_bytes)
        finally:
            os.close(fd)

    def delete(self, segment: int) -> None:
        """Delete a file. Whoever reads it can read on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(segment).name, dir_fd=self.folder.fd)
        with self._lock:
            self._open.pop(segment, None)

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._open.clear()
        self.folder.close()


@contextlib.contextmanager
def locked(folder: PrivateFolder, name: str, flags: int = os.O_RDONLY) -> Iterator[bool]:
    """Lock a file inside the context; False if it is locked already, or gone, or not private."""
    try:
        fd = folder.open(name, flags)
    except (FileNotFoundError, NotPrivateError):
        yield False
        return
    try:
        yield _lock(fd, folder, name)
    finally:
        os.close(fd)


def _lock(fd: int, folder: PrivateFolder, name: str) -> bool:
    """Lock an open file; False if it is locked, or no longer the file with this name."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(name, dir_fd=folder.fd))
    except (BlockingIOError, FileNotFoundError):
        return False


class SegmentWriter:
    """Appends records to a segment that this process has for itself.

    Callers hold :attr:`lock` for as long as an append may be undone.

    Args:
        segments: of the folder.
        segment_bytes: size at which a segment is closed.
        ends: says where the last record of each segment ends, by the segment's number.
    """

    def __init__(
        self, segments: Segments, segment_bytes: int, ends: Callable[[], dict[int, int]]
    ) -> None:
        self.lock = threading.RLock()
        self._segments, self._segment_bytes, self._ends = segments, segment_bytes, ends
        self._fd: int | None = None
        #: Where the next record goes.
        self._next = RecordPlace(0, 0)
        #: Sealed files that are not on the disk yet.
        self._unsynced: list[int] = []
        self._flushing = threading.Lock()

    @property
    def segment(self) -> int | None:
        """The segment that is being written, if any."""
        return None if self._fd is None else self._next.segment

    @property
    def is_full(self) -> bool:
        """Whether the next record begins another segment."""
        return self._next.offset >= self._segment_bytes

    def append(self, views: Sequence[memoryview], *, adopt: bool) -> RecordPlace:
        """Append a record, which is padded to whole blocks; nothing is left of it if that fails.

        ``adopt``: go on with a segment that another process left unfilled, if there is one.
        """
        if self.is_full:
            self.seal()
        fd = self._begin(adopt) if self._fd is None else self._fd
        place, size = self._next, sum(map(len, views))
        padding = memoryview(bytes(-size % BLOCK_BYTES))
        try:
            if transfer(os.pwritev, fd, [*views, padding], place.offset) < size + len(padding):
                raise OSError(errno.EIO, "a write ended early")
        except OSError:
            self.undo(place)
            raise
        self._next = RecordPlace(place.segment, place.offset + size + len(padding))
        return place

    def undo(self, place: RecordPlace) -> None:
        """Cut off what was appended last, at ``place``."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, place.offset)
            self._next = place

    def seal(self) -> None:
        """Close the segment: the next record begins another."""
        with self.lock:
            if self._fd is not None:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                self._unsynced.append(self._fd)
                self._fd = None
            if len(self._unsynced) > _MAX_UNSYNCED:
                self._sync_sealed(self._unsynced[:1])

    def flush(self) -> None:
        """Write to the disk what was appended; others may append meanwhile.

        If the disk refuses, the next flush tries again.
        """
        # A second caller waits for the first, whose files may hold what it appended.
        with self._flushing:
            with self.lock:
                sealed = list(self._unsynced)
                open_fds = [] if self._fd is None else [os.dup(self._fd)]
                if sealed or open_fds:
                    open_fds.append(os.dup(self._segments.folder.fd))
            try:
                self._sync_sealed(sealed)
                for fd in open_fds:
                    os.fsync(fd)
            finally:
                for fd in open_fds:
                    os.close(fd)

    def _sync_sealed(self, fds: Sequence[int]) -> None:
        """Sync and close sealed files, unless another thread has done so."""
        for fd in fds:
            with self.lock:
                if fd not in self._unsynced:
                    continue
                self._unsynced.remove(fd)
            try:
                os.fsync(fd)
            except OSError:
                with self.lock:
                    self._unsynced.append(fd)
                raise
            os.close(fd)

    def close(self) -> None:
        """Seal and flush."""
        self.seal()
        self.flush()

    def _begin(self, adopt: bool) -> int:
        """Open and lock the segment that the next record goes to."""
        for segment, end in reversed(list(self._ends().items()) if adopt else []):
            if self._fd is None and end < self._segment_bytes:
                with contextlib.suppress(FileNotFoundError, NotPrivateError):
                    self._take(segment, 0)
        while self._fd is None:
            # Two processes may have the same time: the later tries again.
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotPrivateError):
                self._take(time.time_ns(), os.O_CREAT | os.O_EXCL)
        return self._fd

    def _take(self, segment: int, flags: int) -> None:
        """Go on with a segment, unless a process is writing it or its end is not the index's."""
        folder, name = self._segments.folder, self._segments.path(segment).name
        fd = folder.open(name, os.O_WRONLY | flags)
        try:
            end = self._ends().get(segment, 0)
            # More bytes are pages that the index lacks, or half a record, which a killed writer
            # left and whose header would hide what is appended after it.
            if _lock(fd, folder, name) and os.fstat(fd).st_size == end:
                self._fd, self._next = fd, RecordPlace(segment, end)
        finally:
            if self._fd != fd:
                os.close(fd)
