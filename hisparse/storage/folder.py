"""The folder of a store: who uses it, and an index that agrees with the segments.

``segments/*.seg`` hold the pages, ``index.sqlite`` says where they are. Each process that has the
store open holds a shared lock of the folder; one that is alone brings the index up to date.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import sqlite3
import time
from itertools import islice
from pathlib import Path
from typing import Final

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.storage.index import Index
from hisparse.storage.segments import Segments, locked

__all__ = ["Folder"]

logger = logging.getLogger(__name__)

#: A process that waited for another may find that it was killed, and wait for a third.
_TRIES: Final = 8
_MAX_WAIT_S: Final = 0.05
#: Pages of one transaction while an index is rebuilt.
_BATCH: Final = 2_000


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
        HiSparseError: the folder can be neither made nor read.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        try:
            self.path = path.expanduser().absolute()
            self.segments = Segments(self.path / "segments")
            if not create and not self.segments.folder.is_dir():
                raise ConfigError(f"got {quoted(str(path))}, expected the folder of a store")
            self.segments.folder.mkdir(parents=True, exist_ok=True)
            self.read_only = not os.access(self.segments.folder, os.W_OK)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # No such user, or no name of a file.
            raise HiSparseError(f"store {quoted(str(path))}: {one_line(error)}") from None
        self._file = self.path / "index.sqlite"
        try:
            self.index = self._open_index()
        except (OSError, sqlite3.Error) as error:
            os.close(self._fd)
            raise HiSparseError(f"store {quoted(str(path))}: {one_line(error)}") from None

    def open_index(self) -> Index:
        """The index once more, for a thread that keeps it busy.

        Raises:
            sqlite3.Error: SQLite cannot open it.
        """
        return Index(self._file)

    def collecting(self) -> contextlib.AbstractContextManager[bool]:
        """A context that is True if no other thread or process is in it."""
        return locked(self.segments.folder)

    def close(self) -> None:
        """Let go of the index and of all files."""
        self.index.close()
        self.segments.close()
        os.close(self._fd)

    def _open_index(self) -> Index:
        if self.read_only:
            return self._copied_index()
        for attempt in range(_TRIES):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Whoever has it open has brought the index up to date, or is about to: wait for it.
                fcntl.flock(self._fd, fcntl.LOCK_SH)
            if (index := self._shared_index(last=attempt == _TRIES - 1)) is not None:
                return index
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            # Others that waited do the same now, and only one that is alone can go on.
            time.sleep(random.uniform(0, _MAX_WAIT_S))
        try:
            return self._recovered(self._checked_index())
        except sqlite3.Error as error:
            logger.warning("store %s takes nothing: %s", self.path, one_line(error))
            self.read_only = True
            return self._copied_index()
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def _shared_index(self, *, last: bool) -> Index | None:
        """The index that others keep; None: they were killed before it was whole.

        Args:
            last: take it as it is. Then what it lacks is absent to this process.
        """
        try:
            index = Index(self._file)
        except sqlite3.Error:
            if last:
                raise
            return None
        if last or index.is_ready():
            return index
        index.close()
        return None

    def _checked_index(self) -> Index:
        """The index as it is, or an empty one if it is absent or damaged."""
        if self._file.exists():
            with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
                index = Index(self._file)
                if index.is_whole():
                    return index
                index.close()
            logger.warning("store %s: the index is damaged and is made anew", self.path)
        for suffix in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)
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
        """Make an index agree with the segments: add what it lacks, drop what is not there."""
        try:
            sizes = self.segments.sizes()
            # First, since copies of lost records are added only where no other is known.
            for number, end in index.ends().items():
                if sizes.get(number, 0) < end:
                    index.set_ready(False)
                    index.cut_segment(number, sizes.get(number, 0))
            known = index.ends()
            for number, size in sizes.items():
                if size > known.get(number, 0):
                    pages = self.segments.open(number).headers(known.get(number, 0))
                    while batch := list(islice(pages, _BATCH)):
                        index.set_ready(False)
                        index.recover(number, batch)
            index.set_ready(True)
        except BaseException:
            index.close()
            raise
        return index
