"""A store of pages in one folder of the file system."""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.storage.collect import HIGH_WATER, LOW_WATER, MIN_LIVE_RATIO, Collector, StoreLimits
from hisparse.storage.folder import Folder
from hisparse.storage.index import Row
from hisparse.storage.namespace import Namespace, key_bytes, make_header, record_bytes
from hisparse.storage.read import Reader
from hisparse.storage.report import StoreCounters, StoreReport, VerifyReport
from hisparse.storage.segments import SegmentWriter

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

#: Bytes that are worth a thread.
_LEAST_SHARE: Final = 1 << 20
#: Threads that read one call's pages.
_THREADS: Final = 2


class FileStore(contextlib.AbstractContextManager["FileStore"]):
    """A store of pages in one folder, shared by threads and processes.

    Pages are appended to segments, large files; each process has a segment of its own. An SQLite
    file beside them says where each page is; it is rebuilt from the segments when it is absent,
    damaged or out of date. Every page that is read is checked, so damage turns into absence.

    What is promised:

    - when :meth:`put` returned True, the page outlives the process, also by SIGKILL;
    - when :meth:`flush` or :meth:`close` returned, it outlives a loss of power as well;
    - :meth:`get` fills a buffer with the bytes that were put under this key, or returns False.

    A full disk, a read-only folder or the size limit make :meth:`put` return False; pages that were
    stored stay. Eviction runs in a thread of its own, begun by a put above the high-water mark.

    Args:
        path: the folder; it is made if absent. Local, as SQLite and file locks need it, and of this
            user alone: links in it, and what others own or can write to, are refused.
        size_bytes: limit of the bytes of segments and contexts; None: no limit. Each process may
            exceed it by one record, and a collection by what it copies at once.
        policy: which pages leave first: "lru", "lfu" or "ttl".
        ttl_s: seconds that an unused page stays; needed by "ttl" and refused by the others.
        segment_bytes: size at which a segment is closed; None: ``size_bytes`` / 64 within 4 MiB
            and 1 GiB.
        create: make the folder if it is absent; False: a folder that is no store is an error.
        clock: seconds since 1970; tests set their own.

    Raises:
        ConfigError: a setting is out of range, or ``create`` is False and there is no store.
        HiSparseError: the folder can be neither made nor read, others can write to it, or another
            process keeps it locked.
    """

    def __init__(
        self,
        path: str | Path,
        size_bytes: int | None = None,
        *,
        policy: str = "lru",
        ttl_s: float | None = None,
        segment_bytes: int | None = None,
        create: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if segment_bytes is not None and segment_bytes < 1:
            raise ConfigError(f"segment_bytes: got {segment_bytes}, expected at least 1")
        self._limits, self._clock = StoreLimits(size_bytes, policy, ttl_s), clock
        self._folder = Folder(Path(path), create=create)
        self._closed = False
        # So that little space waits in unfinished segments.
        segment_bytes = segment_bytes or min(max((size_bytes or 2**63) // 64, 4 << 20), 1 << 30)
        self._writer = SegmentWriter(self._folder.segments, segment_bytes, self._folder.index.ends)
        self._counters = StoreCounters(self._folder.path)
        self._reader = Reader(self._folder, self._counters)
        self._collector = Collector(
            self._folder, self._reader, self._writer, self._limits, self._counters, clock
        )
        self._pool = ThreadPoolExecutor(_THREADS - 1, "hisparse-storage")

    def find(self, namespace: Namespace, keys: Sequence[str]) -> int:
        """Length of the longest prefix of ``keys`` whose pages are all stored.

        Pages that were put one after the other take few statements, however many they are. Keys
        after the first absent one are not looked at.

        Args:
            namespace: of the pages.
            keys: hexadecimal, 2 to 128 digits, an even number of them.

        Raises:
            ConfigError: a key that was looked up is malformed.
        """
        if keys:
            key_bytes(keys[0])  # No key is looked up in a namespace that has no pages.
        since = self._limits.used_since(self._clock())
        try:
            return 0 if self._closed else self._folder.index.find_prefix(namespace, keys, since)
        except sqlite3.Error as error:
            self._note_error("index_errors", error)
            return 0

    def get(
        self, namespace: Namespace, keys: Sequence[str], buffers: Sequence[Buffer]
    ) -> list[bool]:
        """Read pages.

        A page that is short or damaged is dropped from the index and counted.

        Args:
            namespace: of the pages.
            keys: as in :meth:`find`.
            buffers: one for each key: writable, contiguous, of ``namespace.page_bytes`` bytes. It
                gets the page's parts, one after the other.

        Returns:
            For each key whether its buffer holds the page. If not, the buffer's content is
            undefined.

        Raises:
            ConfigError: a key is malformed, or a buffer has another size.
        """
        if len(buffers) != len(keys):
            raise ConfigError(f"got {len(buffers)} buffers for {len(keys)} keys, expected as many")
        size = namespace.page_bytes
        views = [_view(buffer, size, writable=True) for buffer in buffers]
        rows = self._find(namespace, [key_bytes(key) for key in keys])
        jobs = [(i, row, views[i]) for i, row in enumerate(rows) if row is not None]
        each = max(-(-len(jobs) // _THREADS), -(-_LEAST_SHARE // size))
        shares = [jobs[i : i + each] for i in range(0, len(jobs), each)]
        others = [self._pool.submit(self._reader.read, namespace, x) for x in shares[1:]]
        done = self._reader.read(namespace, shares[0]) if shares else []
        done += [i for other in others for i in other.result()]
        with contextlib.suppress(sqlite3.Error):
            used = [row.key for i in done if (row := rows[i]) is not None]
            if self._folder.index.use(namespace, used, self._clock()):
                if self._folder.read_only:
                    self._folder.index.write_uses()  # To memory.
                else:
                    # In another thread: a writer in any process can take its time.
                    self._collector.run_soon(0)
        found, hits = set(done), len(done)
        self._counters.add(hits=hits, misses=len(keys) - hits, read_bytes=hits * size)
        return [i in found for i in range(len(keys))]

    def put(self, namespace: Namespace, key: str, page: Buffer) -> bool:
        """Store a page.

        Args:
            namespace: of the page.
            key: as in :meth:`find`.
            page: contiguous, of ``namespace.page_bytes`` bytes: its parts, one after the other.

        Returns:
            True if the page was written. False if it was there already, or if the store refused
            it: full, read-only, or an error of the disk; :attr:`counters` says which.

        Raises:
            ConfigError: the key is malformed, or the page has another size.
        """
        page_key, view = key_bytes(key), _view(page, namespace.page_bytes)
        if self._closed or self._folder.read_only:
            self._counters.add(refused_read_only=1)
            return False
        try:
            name = self._put(namespace, page_key, view)
        except (OSError, sqlite3.Error) as error:
            self._note_error("refused_disk", error)
            if self._folder.read_only:
                self._writer.seal()  # Others have to read what this process has put.
            return False
        stored = name == "puts"
        self._counters.add(**{name: 1}, put_bytes=stored * namespace.page_bytes)
        return stored

    def flush(self) -> None:
        """Write to the disk what this process put.

        Raises:
            HiSparseError: the disk refuses.
        """
        if self._closed:
            return
        with self._named_errors():
            self._writer.flush()
            self._folder.index.write_uses()

    def close(self) -> None:
        """Flush, and let go of all files. A closed store holds and takes nothing."""
        if self._closed:
            return
        self._collector.stop()
        try:
            self.flush()
        finally:
            self._closed = True
            self._pool.shutdown()
            if dropped := self.counters["damaged"]:
                # The log had one line a minute.
                logger.warning(
                    "store %s: %d damaged pages were dropped while it was open",
                    self._folder.path, dropped,
                )  # fmt: skip
            with self._named_errors():
                self._writer.close()
            self._folder.close()

    def describe(self) -> StoreReport:
        """What the store holds."""
        with self._named_errors():
            index = self._folder.index
            segments, uses = index.segments(), index.namespace_uses()
        return StoreReport(
            path=str(self._folder.path),
            pages=sum(use.pages for use in uses),
            live_bytes=sum(live for _, live in segments.values()),
            segment_bytes=sum(size for size, _ in segments.values()),
            segments=len(segments),
            namespaces=tuple(uses),
        )

    def verify(self) -> VerifyReport:
        """Read and check every page; drop the damaged ones from the index."""
        with self._named_errors():
            return self._reader.verify()

    def collect(self, min_live_ratio: float = MIN_LIVE_RATIO, size_bytes: int | None = None) -> int:
        """Drop expired pages; above 95% of the store's size evict to 85%; give space back.

        Args:
            min_live_ratio: segments with a smaller share of live bytes are copied together and
                deleted, but not those that a process is writing.
            size_bytes: evict down to this instead; None: to the store's size.

        Returns:
            Bytes that were given back to the file system.
        """
        if self._closed or self._folder.read_only:
            return 0
        with self._named_errors():
            return self._collector.run(min_live_ratio, size_bytes=size_bytes)

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
        if keys is not None and namespace is None:
            raise ConfigError("got keys without a namespace, expected both")
        raw = None if keys is None else [key_bytes(key) for key in keys]
        before = math.inf if unused_s is None else self._clock() - unused_s
        with self._named_errors():
            index = self._folder.index
            number = None if namespace is None else index.namespace_id(namespace)
            if namespace is not None and number is None:
                return 0
            return index.remove(number, raw, before)

    @property
    def counters(self) -> dict[str, int]:
        """Since this process opened the store, by name:

        ``hits``, ``misses``: pages that :meth:`get` was asked for; ``read_bytes``;
        ``puts``, ``put_bytes``: stored; ``duplicates``: put and there already;
        ``damaged``: pages dropped; ``read_errors``: pages that the system did not read;
        ``refused_size``, ``refused_read_only``, ``refused_disk``: puts refused for the limit, for
        the folder, and by the system or SQLite;
        ``evicted`` pages; ``collected_bytes`` given back; ``index_errors``: look-ups that failed.
        """
        return self._counters.all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Row | None]:
        """Where the index has pages that are not expired."""
        since = self._limits.used_since(self._clock())
        try:
            rows = [] if self._closed else self._folder.index.find(namespace, keys)
        except sqlite3.Error as error:
            self._note_error("index_errors", error)
            rows = []
        found = [row if row is None or row.used >= since else None for row in rows]
        return found or [None] * len(keys)

    def _put(self, namespace: Namespace, key: bytes, page: memoryview) -> str:
        """Store a page. Returns the name of the counter."""
        index, limits, now = self._folder.index, self._limits, self._clock()
        (row,) = index.find(namespace, [key])
        if row is not None:
            if row.used >= limits.used_since(now):
                return "duplicates"
            index.drop(row)
        size, used = record_bytes(namespace.page_bytes), self._folder.num_bytes(index)
        most = limits.size_bytes or math.inf
        if used + size > most:
            if size <= LOW_WATER * most:
                self._collector.run_soon(size)
            return "refused_size"
        header = make_header(namespace, key, page, now)
        with self._writer.lock:
            self._folder.check_index()
            place = self._writer.append([memoryview(header), page], adopt=True)
            try:
                added = index.add(namespace, key, place, size, now)
            except sqlite3.Error:
                self._writer.undo(place)
                raise
            if not added:
                self._writer.undo(place)
        if used + size > HIGH_WATER * most:
            self._collector.run_soon(0)
        return "puts" if added else "duplicates"

    def _note_error(self, name: str, error: Exception) -> None:
        """Count an error."""
        self._counters.add(**{name: 1})
        self._counters.warn(name, one_line(error))

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Errors of the system and of SQLite become ours, with the folder."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            message = f"store {quoted(str(self._folder.path))}: {one_line(error)}"
            raise HiSparseError(message) from None


def _view(buffer: Buffer, size: int, *, writable: bool = False) -> memoryview:
    """The bytes of a buffer.

    Raises:
        ConfigError: it is not contiguous, has another size, or is not writable.
    """
    try:
        view = memoryview(buffer).cast("B")
    except TypeError as error:
        raise ConfigError(f"got {quoted(buffer)}, expected a contiguous buffer: {error}") from None
    if len(view) != size:
        raise ConfigError(f"got a buffer of {len(view):,} bytes, expected {size:,}")
    if writable and view.readonly:
        raise ConfigError("got a read-only buffer, expected a writable one")
    return view
