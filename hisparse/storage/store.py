"""A store of pages in one folder of the file system."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hisparse.errors import ConfigError, one_line, quoted
from hisparse.private_files import NotPrivateError
from hisparse.storage.evict import HIGH_WATER, LOW_WATER, Evictor, expired_ns
from hisparse.storage.folder import StoreFolder, system_error
from hisparse.storage.namespace import Namespace, check_key
from hisparse.storage.pages import ABSENT, DIGEST_BYTES, DamagedError, PageFolder, disk_bytes
from hisparse.storage.report import Damage, NamespaceUse, StoreCounters, StoreReport, VerifyReport
from hisparse.units import MemorySize, parse_memory

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

#: Bytes that are worth a thread.
_LEAST_SHARE: Final = 1 << 20
#: Threads that read one call's pages.
_THREADS: Final = 2


class FileStore(contextlib.AbstractContextManager["FileStore"]):
    """A store of pages in one folder, shared by threads and processes.

    A page is a file. It gets its name when it is whole, and it is checked when it is read, so
    damage turns into absence.

    What is promised:

    - when :meth:`put` returned True, the page outlives the process, also by SIGKILL;
    - when :meth:`flush` or :meth:`close` returned, it outlives a loss of power as well;
    - :meth:`get` fills a buffer with the bytes that were put under this key, or returns False.

    A full disk, a read-only folder or the size limit make :meth:`put` return False; pages that were
    stored stay. Eviction runs in a thread of its own, begun by a put above the high-water mark. The
    least recently used pages leave first.

    Args:
        path: the folder, on a local disk because of its file locks; it is made if absent. Only
            this user may own it and write to it, and links in it are refused.
        size: limit of the bytes of pages, such as "500GiB"; a fraction is of the file system's
            size. None: no limit.
        ttl_s: seconds after which an unused page is absent; it is deleted within a minute or two of
            use of the store. None: until its space is needed.
        create: make the folder if it is absent; False: a folder that is no store is an error.

    Raises:
        ConfigError: a setting is out of range, or ``create`` is False and there is no store.
        HiSparseError: the folder can be neither made nor read, or others can write to it.
    """

    def __init__(
        self,
        path: str | Path,
        size: MemorySize | None = None,
        *,
        ttl_s: float | None = None,
        create: bool = True,
    ) -> None:
        if ttl_s is not None and not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise ConfigError(f"ttl_s: got {quoted(ttl_s)}, expected seconds above 0")
        limit = None if size is None else parse_memory("size", size)
        self._folder = StoreFolder(Path(path), create=create)
        if isinstance(limit, float):
            limit = int(limit * shutil.disk_usage(self._folder.path).total)
        self._size_bytes, self._ttl_s = limit, ttl_s
        self._closed, self._num_calls, self._calls = False, 0, threading.Condition()
        self._counters = StoreCounters(self._folder.path)
        self._evictor = Evictor(self._folder, limit, ttl_s, self._counters)
        self._pool = ThreadPoolExecutor(_THREADS - 1, "hisparse-storage")

    def find(self, namespace: Namespace, keys: Sequence[str]) -> int:
        """Length of the longest prefix of ``keys`` whose pages are all stored.

        Keys after the first absent one are not looked at. For some seconds, a page that another
        process has removed may still be counted.

        Args:
            keys: hexadecimal, 2 to 128 digits, an even number of them.

        Raises:
            ConfigError: a key that was looked up is malformed.
        """
        for key in keys[:1]:
            check_key(key)
        with self._pages(namespace) as folder:
            if folder is None:
                return 0
            return folder.find(keys, namespace.page_bytes, expired_ns(self._ttl_s))

    def get(
        self, namespace: Namespace, keys: Sequence[str], buffers: Sequence[Buffer]
    ) -> list[bool | None]:
        """Read pages.

        A page that is short or damaged is removed and counted.

        Args:
            keys: as in :meth:`find`.
            buffers: one for each key: writable, contiguous, of ``namespace.page_bytes`` bytes.

        Returns:
            For each key True if its buffer holds the page. If not, the buffer's content is
            undefined: None if the page is absent, False if it was damaged.

        Raises:
            ConfigError: a key is malformed, or a buffer has another size.
        """
        if len(buffers) != len(keys):
            raise ConfigError(f"got {len(buffers)} buffers for {len(keys)} keys, expected as many")
        size = namespace.page_bytes
        views = [_view(buffer, size, writable=True) for buffer in buffers]
        pages = list(zip(map(check_key, keys), views, strict=True))
        found: list[bool | None] = [None] * len(keys)
        with self._pages(namespace) as folder:
            if folder is not None:
                each = max(-(-len(pages) // _THREADS), -(-_LEAST_SHARE // size))
                shares = [pages[i : i + each] for i in range(0, len(pages), each)]

                def read(share: Sequence[tuple[str, memoryview]]) -> list[bool | None]:
                    return [self._read_one(folder, key, view) for key, view in share]

                others = [self._pool.submit(read, share) for share in shares[1:]]
                found = read(shares[0]) if shares else []
                for other, share in zip(others, shares[1:], strict=True):
                    # The pool's thread may be busy with another call.
                    found += read(share) if other.cancel() else other.result()
                for (key, _), ok in zip(pages, found, strict=True):
                    if ok and not self._folder.read_only:
                        folder.note_use(key)
        hits = found.count(True)
        self._counters.add(hits=hits, misses=len(keys) - hits, read_bytes=hits * size)
        return found

    def _read_one(self, folder: PageFolder, key: str, view: memoryview) -> bool | None:
        if folder.used_ns(key, None) <= expired_ns(self._ttl_s):
            return None
        try:
            folder.read(key, view)
        except (FileNotFoundError, NotPrivateError):
            return None
        except DamagedError as error:
            self._counters.add(damaged=1)
            self._counters.warn("damaged", f"page {key} is dropped: {error}")
            return False
        except OSError as error:
            self._note_error("read_errors", error)
            return None
        return True

    def put(self, namespace: Namespace, key: str, page: Buffer) -> bool:
        """Store a page.

        Args:
            key: as in :meth:`find`.
            page: contiguous, of ``namespace.page_bytes`` bytes.

        Returns:
            True if the page was written. False if it was there already, or if the store refused
            it: full, read-only, or an error of the disk; :attr:`counters` says which.

        Raises:
            ConfigError: the key is malformed, or the page has another size.
        """
        name, view = check_key(key), _view(page, namespace.page_bytes)
        with self._call() as is_open:
            if not is_open or self._folder.read_only:
                self._counters.add(refused_read_only=1)
                return False
            try:
                result = self._put(namespace, name, view)
            except OSError as error:
                self._note_error("refused_disk", error)
                return False
        stored = result == "puts"
        self._counters.add(**{result: 1}, put_bytes=stored * namespace.page_bytes)
        return stored

    def _put(self, namespace: Namespace, key: str, page: memoryview) -> str:
        """Store a page. Returns the name of the counter."""
        folder = self._folder.make_folder(namespace)
        used_ns = folder.used_ns(key, len(page))
        if used_ns > expired_ns(self._ttl_s):
            return "duplicates"
        size, most = disk_bytes(len(page) + DIGEST_BYTES), self._size_bytes or math.inf
        used, written = self._folder.add_bytes(size), False
        try:
            if used <= most:
                written = folder.write(key, page, replace=used_ns != ABSENT)
        finally:
            if not written:
                self._folder.add_bytes(-size)
        if used > HIGH_WATER * most:
            # A page that is larger than an eviction leaves room makes no others leave.
            self._evictor.run_soon(0 if written or size > LOW_WATER * most else size)
        self._evictor.run_if_due()
        return "puts" if written else "refused_size" if used > most else "duplicates"

    def flush(self) -> None:
        """Write to the disk what was put; the whole file system of the folder is synced.

        Raises:
            HiSparseError: the disk refuses.
        """
        if not self._closed and not self._folder.read_only:
            with self._named_errors():
                self._folder.sync()

    def close(self) -> None:
        """Flush, and let go of all files. A closed store holds and takes nothing."""
        if self._closed:
            return
        self._evictor.stop()
        try:
            self.flush()
        finally:
            with self._calls:
                self._closed = True
                self._calls.wait_for(lambda: not self._num_calls)
            self._pool.shutdown()
            if dropped := self.counters["damaged"]:
                # The log had one line a minute.
                text = "store %s: %d damaged pages were dropped while it was open"
                logger.warning(text, self._folder.path, dropped)
            self._folder.close()

    def describe(self) -> StoreReport:
        """What the store holds."""
        num_pages, num_bytes, uses = 0, 0, []
        with self._named_errors():
            for folder in self._folder.folders():
                pages, size, used_ns = 0, 0, 0
                for page in folder.scan():
                    pages, size = pages + 1, size + disk_bytes(page.num_bytes)
                    used_ns = max(used_ns, page.used_ns)
                num_pages, num_bytes = num_pages + pages, num_bytes + size
                if pages and (namespace := folder.namespace) is not None:
                    use = NamespaceUse(
                        namespace=namespace, pages=pages, bytes=size, last_used=used_ns / 1e9
                    )
                    uses.append(use)
        uses.sort(key=lambda use: use.bytes, reverse=True)
        path = str(self._folder.path)
        return StoreReport(path=path, pages=num_pages, bytes=num_bytes, namespaces=tuple(uses))

    def verify(self) -> VerifyReport:
        """Read and check every page; remove the damaged ones, if the store can be written."""
        pages, num_bytes, damaged = 0, 0, []
        with self._named_errors():
            for folder, page in self._folder.scan():
                pages, num_bytes = pages + 1, num_bytes + disk_bytes(page.num_bytes)
                try:
                    folder.read(page.key, memoryview(bytearray(page.page_bytes)))
                except FileNotFoundError:
                    pass  # Evicted meanwhile.
                except DamagedError as error:
                    self._counters.add(damaged=1)
                    damaged.append(Damage(namespace=folder.key, key=page.key, reason=str(error)))
                except OSError as error:
                    damaged.append(Damage(namespace=folder.key, key=page.key, reason=str(error)))
        return VerifyReport(pages=pages, bytes=num_bytes, damaged=tuple(damaged))

    def collect(self, size_bytes: int | None = None) -> int:
        """Remove expired pages; above 95% of the store's size evict to 85%.

        Args:
            size_bytes: evict down to this instead; None: to the store's size.

        Returns:
            Bytes that were given back to the file system.
        """
        if self._closed or self._folder.read_only:
            return 0
        with self._named_errors():
            return self._evictor.run(size_bytes=size_bytes)

    def remove(
        self,
        namespace: Namespace | None = None,
        keys: Sequence[str] | None = None,
        unused_s: float | None = None,
    ) -> int:
        """Remove pages.

        Args:
            namespace: only its pages; None: of all namespaces.
            keys: only these pages; needs ``namespace``. None: all.
            unused_s: only pages that nobody wrote or read for so many seconds; not with ``keys``.

        Returns:
            The number of pages removed.
        """
        if keys is not None and namespace is None:
            raise ConfigError("got keys without a namespace, expected both")
        if self._closed or self._folder.read_only:
            return 0
        until_ns = math.inf if unused_s is None else (time.time() - unused_s) * 1e9
        with self._named_errors():
            if keys is not None and namespace is not None:
                with self._pages(namespace) as folder:
                    sizes = [] if folder is None else list(map(folder.remove, map(check_key, keys)))
                removed, given = len(sizes) - sizes.count(0), sum(sizes)
            else:
                key = None if namespace is None else namespace.key
                removed, given, error = self._folder.remove(lambda x: x.used_ns <= until_ns, key)
                if error is not None:
                    self._counters.warn("remove", f"pages stay: {one_line(error)}")
        self._counters.add(collected_bytes=given)
        return removed

    @property
    def counters(self) -> dict[str, int]:
        """Since this process opened the store, by name:

        ``hits``, ``misses``: pages that :meth:`get` was asked for; ``read_bytes``;
        ``puts``, ``put_bytes``: stored; ``duplicates``: put and there already;
        ``damaged``: pages removed; ``read_errors``: pages that the system did not read;
        ``refused_size``, ``refused_read_only``, ``refused_disk``: puts refused for the limit, for
        the folder, and by the system;
        ``evicted`` pages; ``collected_bytes`` given back.
        """
        return self._counters.all()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _call(self) -> Iterator[bool]:
        """Whether the store is open; it stays so inside of the context."""
        with self._calls:
            is_open = not self._closed
            self._num_calls += is_open
        try:
            yield is_open
        finally:
            with self._calls:
                self._num_calls -= is_open
                self._calls.notify_all()

    @contextlib.contextmanager
    def _pages(self, namespace: Namespace) -> Iterator[PageFolder | None]:
        """The pages of a namespace; None: there are none, or nobody can look."""
        with self._call() as is_open:
            folder = None
            if is_open:
                self._evictor.run_if_due()
                try:
                    folder = self._folder.folder(namespace.key)
                except OSError as error:
                    self._note_error("read_errors", error)
            yield folder

    def _note_error(self, name: str, error: Exception) -> None:
        """Count an error."""
        self._counters.add(**{name: 1})
        self._counters.warn(name, one_line(error))

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Errors of the system become ours, with the folder."""
        try:
            with self._call():
                yield
        except OSError as error:
            raise system_error(self._folder.path, error) from None


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
