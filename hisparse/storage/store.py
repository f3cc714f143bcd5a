"""A store of pages in one folder of the file system."""

from __future__ import annotations

import time
from collections.abc import Buffer, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from hisparse.storage.namespace import Namespace
from hisparse.storage.report import StoreReport, VerifyReport

__all__ = ["POLICIES", "FileStore"]

#: Which pages leave first when the store is full: the least recently used, the least often used,
#: or, after those that nobody used for ``ttl_s``, the least recently used.
POLICIES: Final = ("lru", "lfu", "ttl")


class FileStore:
    """A store of pages in one folder, shared by threads and processes.

    Pages are appended to segments, large files; each process has a segment of its own. An SQLite
    file beside them says where each page is; it is rebuilt from the segments when it is absent,
    damaged or behind them. Every page that is read is checked, so damage turns into absence.

    What is promised:

    - when :meth:`put` returned True, the page outlives the process, also by SIGKILL;
    - when :meth:`flush` or :meth:`close` returned, it outlives a loss of power as well;
    - :meth:`get` fills a buffer with the bytes that were put under this key, or returns False.

    A full disk, a read-only folder or the size limit make :meth:`put` return False; pages that were
    stored stay. Eviction runs in a thread of its own, begun by a put above the high-water mark.

    Args:
        path: the folder; it is made if absent. Local, as SQLite and file locks need it.
        size_bytes: limit of the segments' size; a process may exceed it by one record. None: what
            the store was last opened with, or no limit.
        policy: one of :data:`POLICIES`; None: what the store was last opened with, or "lru".
        ttl_s: seconds that an unused page stays; needed by "ttl" and refused by the others.
        high_water: share of ``size_bytes`` at which eviction begins.
        low_water: share of ``size_bytes`` at which eviction ends.
        segment_bytes: size at which a segment is closed; None: ``size_bytes`` / 64 within 4 MiB
            and 1 GiB.
        threads: threads that read one call's pages.
        direct: read past the system's page cache (O_DIRECT) where buffer, file and part sizes are
            aligned to 4 KiB; other reads are as without it.
        create: make the folder if it is absent; False: a folder that is no store is an error.
        clock: seconds since 1970; tests set their own.

    Raises:
        ConfigError: a setting is out of range, or ``create`` is False and there is no store.
        HiSparseError: the folder can be neither made nor read.
    """

    def __init__(
        self,
        path: str | Path,
        size_bytes: int | None = None,
        *,
        policy: str | None = None,
        ttl_s: float | None = None,
        high_water: float = 0.95,
        low_water: float = 0.85,
        segment_bytes: int | None = None,
        threads: int = 2,
        direct: bool = False,
        create: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    def find(self, namespace: Namespace, keys: Sequence[str]) -> int:
        """Length of the longest prefix of ``keys`` whose pages are all stored.

        Args:
            namespace: of the pages.
            keys: hexadecimal, 2 to 128 digits, an even number of them.

        Raises:
            ConfigError: a key is malformed.
        """
        raise NotImplementedError

    def get(
        self,
        namespace: Namespace,
        keys: Sequence[str],
        buffers: Sequence[Buffer],
        part: int | None = None,
    ) -> list[bool]:
        """Read pages, or one part of each.

        A page that is short or damaged is dropped from the index and counted.

        Args:
            namespace: of the pages.
            keys: as in :meth:`find`.
            buffers: one for each key: writable, contiguous, of ``namespace.page_bytes`` bytes, or
                of ``namespace.part_bytes[part]``.
            part: number of the part; None: all parts, one after the other.

        Returns:
            For each key whether its buffer holds the page. If not, the buffer's content is
            undefined.

        Raises:
            ConfigError: a key is malformed, or a buffer has another size.
        """
        raise NotImplementedError

    def put(self, namespace: Namespace, key: str, parts: Sequence[Buffer]) -> bool:
        """Store a page.

        Args:
            namespace: of the page.
            key: as in :meth:`find`.
            parts: contiguous buffers of ``namespace.part_bytes`` bytes.

        Returns:
            True if the page was written. False if it was there already, or if the store refused
            it: full, read-only, or an error of the disk; :attr:`counters` says which.

        Raises:
            ConfigError: the key is malformed, or a part has another size.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Write to the disk what this process put.

        Raises:
            HiSparseError: the disk refuses.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Flush, and let go of all files. A closed store holds and takes nothing."""
        raise NotImplementedError

    def describe(self) -> StoreReport:
        """What the store holds."""
        raise NotImplementedError

    def verify(self) -> VerifyReport:
        """Read and check every page; drop the damaged ones from the index."""
        raise NotImplementedError

    def collect(self, min_live_ratio: float = 0.5) -> int:
        """Drop expired pages; at the high-water mark evict to the low one; give space back.

        Segments whose live bytes are below ``min_live_ratio`` of their size are copied together
        and deleted, but not those that a process is writing.

        Returns:
            Bytes that were given back to the file system.
        """
        raise NotImplementedError

    def remove(
        self,
        namespace: Namespace | None = None,
        keys: Sequence[str] | None = None,
        unused_s: float | None = None,
    ) -> int:
        """Remove pages from the index; :meth:`collect` gives their space back.

        Args:
            namespace: only its pages; None: of all namespaces.
            keys: only these pages; needs ``namespace``. None: all.
            unused_s: only pages that nobody wrote or read for so many seconds.

        Returns:
            The number of pages removed.
        """
        raise NotImplementedError

    @property
    def counters(self) -> dict[str, int]:
        """Since this process opened the store, by name:

        ``hits``, ``misses`` pages that :meth:`get` was asked for; ``read_bytes``;
        ``puts``, ``put_bytes`` pages stored; ``duplicates`` that were there already;
        ``damaged`` pages that were dropped; ``read_errors`` reads that the system refused;
        ``refused_size``, ``refused_read_only``, ``refused_disk`` puts that were refused;
        ``evicted`` pages, ``collected_bytes`` given back; ``index_errors`` of SQLite.
        """
        raise NotImplementedError

    def __enter__(self) -> FileStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
