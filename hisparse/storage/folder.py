"""The folder of a store: whose it is, who uses it, and an index that agrees with the segments.

``segments/*.seg`` hold the pages, ``index.sqlite`` says where they are. Each process that has the
store open holds a shared lock of ``open.lock``; one that is alone brings the index up to date.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import re
import sqlite3
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Final

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.private_files import NotPrivateError, PrivateFolder, lock_holder
from hisparse.storage.contexts import contexts_path
from hisparse.storage.index import Index
from hisparse.storage.namespace import BLOCK_BYTES
from hisparse.storage.schema import is_refusal
from hisparse.storage.segments import SEGMENT_NAME, Segments, locked

logger = logging.getLogger(__name__)

#: A process that waited for another may find that it was killed, and wait for a third.
_TRIES: Final = 8
_MAX_WAIT_S: Final = 0.05
#: Pages of one transaction while an index is rebuilt.
_BATCH: Final = 2_000
#: Seconds after which a process says that it waits for another, and after which it gives up. The
#: other reads the header of every page if the index is lost: 10,000 and more pages a second.
_SAY_S: Final = 2.0
_GIVE_UP_S: Final = 1800.0
#: Files that only this user can open and lock.
_LOCK: Final = "open.lock"
_COLLECT_LOCK: Final = "collect.lock"
#: Names in the folder of a store.
_OWN: Final = re.compile(r"(segments|(index|contexts)\.sqlite(-\w+)?|(open|collect)\.lock)$")


class Folder:
    """The folder of a store, open.

    Args:
        path: the folder.
        create: make it if it is absent.

    Attributes:
        path: the folder.
        segments: its segments.
        index: its index.
        read_only: whether nothing can be written; the index is then a copy in memory.

    Raises:
        ConfigError: ``create`` is False and there is no store.
        HiSparseError: the folder can be neither made nor read, others can write to it, or another
            process keeps it locked.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self._file, self._lock = Path("index.sqlite"), -1
        #: Bytes of each segment that were read beyond its last record.
        self._read: dict[int, int] = {}
        try:
            self.path = path.expanduser().absolute()
            self._file = self.path / self._file
            if not create and not self._is_store():
                raise ConfigError(f"got {quoted(str(path))}, expected the folder of a store")
            self._open_folders()
            self._private.check_database(self._file.name)
            self.index = self._open_index()
            self._private.check_path()
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError, sqlite3.Error) as error:
            # ValueError and RuntimeError: no name of a file, and no such user.
            self._unlock()
            reason = str(error) if isinstance(error, NotPrivateError) else one_line(error)
            raise HiSparseError(f"store {quoted(str(path))}: {reason}") from None

    def _open_folders(self) -> None:
        """Open or make the folders and the file that processes lock."""
        pages = self.path / "segments"
        new = [each for each in pages.parents if not each.exists()]
        self._private = PrivateFolder(self.path, or_roots=True)
        if was_open := self._private.is_open_to_others():
            names = {entry.name for entry in self._private.entries()}
            if not self._is_store() and not all(map(_OWN.match, names)):
                raise NotPrivateError(
                    f"{self.path} has other files, and others can read it; expected a new or empty "
                    "folder, or a store: give the store a folder of its own"
                )
            self._private.tighten()
        folder = PrivateFolder(pages, parent=self._private, or_roots=True)
        folder.tighten()
        self.segments = Segments(folder)
        self.read_only = self._private.read_only or folder.read_only
        if self.read_only:
            return
        if was_open:
            self._private.tighten_files(_OWN)
            folder.tighten_files(SEGMENT_NAME)
            logger.warning(
                "store %s: others could read it; its folders have mode 700 now, its files mode 600",
                self.path,
            )
        for synced in {self.path, *(each.parent for each in new)}:
            _sync(synced)
        self._lock = self._private.open(_LOCK, os.O_RDWR | os.O_CREAT)
        # Now: a disk that is full later may have no room for it.
        os.close(self._private.open(_COLLECT_LOCK, os.O_RDWR | os.O_CREAT))

    def _is_store(self) -> bool:
        """Whether there is a file that a store makes: other folders may have one named segments."""
        names = os.listdir(self.path / "segments") if (self.path / "segments").is_dir() else []
        files = (self._file, self.path / _LOCK)
        return any(map(SEGMENT_NAME.fullmatch, names)) or any(x.exists() for x in files)

    def open_index(self) -> Index:
        """The index once more, for a thread that keeps it busy."""
        index = Index(self._file)
        try:
            self.check_index()
        except OSError:
            index.close()
            raise
        return index

    def check_index(self) -> None:
        """Raise ``OSError`` unless the index is still the file of the folder: only this process may
        know what it says. Nothing is then written from now on.
        """
        with contextlib.suppress(FileNotFoundError):
            opened = self.index.opened
            if opened and os.path.samestat(opened, os.stat(self._file)):
                return
        reason = "its index was deleted or replaced while it was open, expected the one that it had"
        if not self.read_only:
            self._leave(f"{reason}; start it again")
        raise OSError(errno.ESTALE, reason)

    def collecting(self) -> contextlib.AbstractContextManager[bool]:
        """A context that is True if no other thread or process is in it."""
        return locked(self._private, _COLLECT_LOCK, os.O_RDWR | os.O_CREAT)

    def close(self) -> None:
        """Let go of the index and of all files."""
        self.index.close()
        self.segments.close()
        self._private.close()
        self._unlock()

    def _unlock(self) -> None:
        """Let another process be alone."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open_index(self) -> Index:
        if self.read_only:
            return self._copied_index()
        reason = "other processes have it open, and there is no whole index"
        until = time.monotonic() + _GIVE_UP_S
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                index = self._whole_index()
            except BlockingIOError:
                # Whoever has it open has brought the index up to date, or is about to: wait for it.
                self._lock_shared(until)
                index = self._shared_index()
            except (OSError, sqlite3.Error) as error:
                if isinstance(error, PermissionError):
                    raise
                reason = one_line(error)
                break
            if index is not None:
                return index
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            # Others that waited do the same now, and only one that is alone can go on.
            time.sleep(random.uniform(0, _MAX_WAIT_S))
        self._leave(reason)
        return self._copied_index()

    def _leave(self, reason: str) -> None:
        """Write nothing from now on, so that another process may be alone and make the index."""
        logger.warning("store %s takes nothing: %s", self.path, reason)
        self.read_only = True
        self._unlock()

    def _lock_shared(self, until: float) -> None:
        """Lock the folder beside others, once none of them is making the index."""
        start, told = time.monotonic(), False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            now = time.monotonic()
            if now > start + _SAY_S and not told:
                told = True
                logger.warning(
                    "store %s: waiting for %s, which makes the index, for at most %.0f s more",
                    self.path, lock_holder(self._lock), until - now,
                )  # fmt: skip
            if now > until:
                raise TimeoutError(
                    f"{lock_holder(self._lock)} has kept {_LOCK} locked for {now - start:.0f} s; "
                    "expected it to have made the index: start again when it is done, or end it"
                )
            time.sleep(random.uniform(0, _MAX_WAIT_S))

    def _whole_index(self) -> Index | None:
        """The index, made whole while no other process changes it; None: one is collecting."""
        with self.collecting() as free:
            if not free:
                # It has left the store, and is about to delete a segment that it has copied.
                return None
            index = self._recovered(self._checked_index())
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return index

    def _shared_index(self) -> Index | None:
        """The index that others keep; None: they were killed before it was whole."""
        if not self._file.exists():
            return None
        with contextlib.suppress(OSError, sqlite3.Error):
            index = Index(self._file)
            if index.is_ready():
                # It may be from a backup.
                with contextlib.suppress(OSError, sqlite3.Error):
                    self.read_on(index)
                return index
            index.close()
        return None

    def _checked_index(self) -> Index:
        """The index as it is, or an empty one if it is absent or damaged.

        An index stays where the system refuses to read it.
        """
        if self._file.exists():
            try:
                with contextlib.ExitStack() as stack:
                    index = stack.enter_context(contextlib.closing(Index(self._file)))
                    if index.is_whole():
                        stack.pop_all()
                        return index
            except (sqlite3.Error, UnicodeDecodeError) as error:
                if is_refusal(error):
                    raise
            logger.warning("store %s: the index is damaged and is made anew", self.path)
        for suffix in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)
        self._private.check_database(self._file.name, create=True)
        return Index(self._file, create=True)

    def _copied_index(self) -> Index:
        """A copy of the index in memory, or a new one."""
        with contextlib.suppress(sqlite3.Error):
            index = Index(None, source=self._file)
            if index.is_whole():
                return self._recovered(index)
            index.close()
        return self._recovered(Index(None, create=True))

    def _recovered(self, index: Index) -> Index:
        """Make an index agree with the segments as they are; no other process changes it."""
        try:
            self._read.clear()
            self.read_on(index, alone=True)
            index.set_ready()
        except BaseException:
            index.close()
            raise
        return index

    def num_bytes(self, index: Index) -> int:
        """Bytes of what has to fit the size of the store: its segments, and contexts."""
        num_bytes = sum(index.ends().values())
        with contextlib.suppress(FileNotFoundError):
            num_bytes += os.stat(contexts_path(self.path)).st_size
        return num_bytes

    def read_on(self, index: Index, *, alone: bool = False) -> bool:
        """Make an index agree with the segments: add what it lacks, drop what is not there.

        A segment of which the index lacks pages is data until it was read: nothing else may be done
        with it before. What cannot be read is left as it is, and absent.

        Args:
            index: of this folder.
            alone: read also segments that are locked. Otherwise a process is writing those, and
                adds to the index what it writes.

        Returns:
            Whether the index has what all segments have.
        """
        # In this order, since others may append between the two.
        known = index.ends()
        sizes = self.segments.sizes()
        # First, since copies of lost records are added only where no other is known.
        self._drop_lost(index, known, sizes, alone=alone)
        is_whole = True
        for number, size in sizes.items():
            if size <= max(known.get(number, 0), self._read.get(number, 0)):
                continue
            try:
                with nullcontext(True) if alone else self.segments.locked(number) as free:
                    if free:
                        self.read_segment(index, number)
                    is_whole = is_whole and free
            except OSError as error:
                logger.warning("store %s: %s", self.path, one_line(error))
                is_whole = False
        return is_whole

    def _drop_lost(
        self, index: Index, known: dict[int, int], sizes: dict[int, int], *, alone: bool
    ) -> None:
        """Drop from an index what lies beyond the ends of files; see :meth:`read_on`."""
        lost = {}
        try:
            for number, end in known.items():
                size = sizes.get(number, 0)
                # A reader finds out what is lacking from a file that others use.
                if size >= end or (number in sizes and not alone):
                    continue
                if size and not self.read_only:
                    # Nothing is appended to a file that ends after the first byte of a block. An
                    # index from a backup may know pages at these places, which get no others.
                    marked = size - size % BLOCK_BYTES + 1
                    self.segments.truncate(number, marked)
                if dropped := index.cut_segment(number, size):
                    lost[number] = dropped
        finally:
            if lost:
                logger.warning(
                    "store %s: %d pages are dropped from the index: the files of %d segments are "
                    "gone or too short, such as %s", self.path, sum(lost.values()), len(lost),
                    self.segments.path(max(lost, key=lost.__getitem__)).name,
                )  # fmt: skip

    def read_segment(self, index: Index, number: int) -> None:
        """Add the records of a segment that are beyond its end in the index."""
        segment = self.segments.open(number)
        size, start = segment.num_bytes, max(index.ends().get(number, 0), self._read.get(number, 0))
        if size > start:
            pages = segment.headers(start)
            while batch := list(islice(pages, _BATCH)):
                index.recover(number, batch)
            self._read[number] = size


def _sync(folder: Path) -> None:
    """Write to the disk which files a folder has."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
