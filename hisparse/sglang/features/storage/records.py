"""Records of one kind in a store: looks them up, and loads them into the KV pool."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final, Self

from torch import Tensor

from hisparse.cache.serializer import PageSerializer
from hisparse.sglang.features.storage.calls import Gate, StorageCounters, StorageHealth, Workers
from hisparse.sglang.features.storage.pages import BackendPages, FilePages, Keys
from hisparse.storage import Namespace

logger = logging.getLogger("hisparse")

#: Seconds for which a record counts as absent.
_SECONDS: Final = 60.0
_MOST_KEYS: Final = 65536


class LostKeys:
    """Records that a store named and could not read. They count as absent for a while.

    No load asks for them, and an offload replaces them.

    Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def add(self, keys: Iterable[str]) -> None:
        """Note records that could not be read."""
        until = time.monotonic() + _SECONDS
        with self._lock:
            self._expire()
            for key in keys:
                self._until.pop(key, None)  # The oldest stay first.
                self._until[key] = until
            for key in list(self._until)[:-_MOST_KEYS]:
                del self._until[key]

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records that were written again."""
        with self._lock:
            for key in keys if self._until else ():
                self._until.pop(key, None)

    def first(self, keys: Keys) -> int:
        """Index of the first key that counts as absent; their number if none does."""
        with self._lock:
            self._expire()
            if not self._until or self._until.keys().isdisjoint(keys):
                return len(keys)
            return next(i for i, key in enumerate(keys) if key in self._until)

    def _expire(self) -> None:
        now = time.monotonic()
        for key in list(takewhile(lambda key: self._until[key] <= now, self._until)):
            del self._until[key]


@dataclass(kw_only=True)
class RecordStore:
    """Records of one kind in a store.

    Callers that write ask for the keys of pages once, when they learn of the pages: the namespace
    changes with the model's weights, and pages stay those of the weights that computed them.

    A load ends before its request is admitted. So a request either has all of its pages, checked,
    or computes its prompt, and other requests are not affected.

    Attributes:
        storage: the store.
        serializer: moves them to and from host pages, ``pages_per_record`` each.
        health: time limits.
        counters: counts.
        threads: blocks of records that are read at a time.
        otherwise: what happens to pages that could not be loaded, for the log.
        namespace: of :meth:`keys` from now on; None: not known yet.
        lost: those that the store has and that could not be read.
    """

    storage: FilePages | BackendPages
    serializer: PageSerializer
    health: StorageHealth
    counters: StorageCounters
    threads: int
    otherwise: str = "their request computes them"
    namespace: Namespace | None = None
    lost: LostKeys = field(default_factory=LostKeys)

    def __post_init__(self) -> None:
        self._workers = Workers(self.threads, "hisparse-load")

    def within(self, namespace: Namespace, **changes: Any) -> Self:
        """Records in another namespace of the store."""
        return replace(self, namespace=namespace, lost=LostKeys(), **changes)

    def keys(self, pages: Sequence[str]) -> Keys:
        """Keys of pages of the namespace that is in use."""
        assert self.namespace is not None, "a namespace is set before its keys are asked for"
        return Keys(self.namespace, pages)

    def find(self, names: Sequence[str]) -> int:
        """Length of the longest prefix of the pages ``names`` that can be loaded."""
        keys, found = self.keys(names), 0
        if keys and self.health.is_usable(self._workers):
            found = self.health.call(self._workers, lambda: self.storage.find(keys)) or 0
            found = self.lost.first(keys[:found])
        self.counters.add(found_pages=found, absent_pages=len(keys) - found)
        return found

    def load(self, names: Sequence[str], pages: Tensor, ready: Sequence[Any]) -> bool:
        """Load records; whether all have arrived whole, and in time.

        Args:
            names: of the records, in the namespace that is in use.
            pages: ``[records * pages_per_record] int64``, host pages; after False nothing writes
                to them any more.
            ready: events after which no forward writes to the host pages.
        """
        if not self.health.is_usable(self._workers):
            self.counters.add(failed_loads=1)
            return False
        began, keys, gates = time.monotonic(), self.keys(names), list[Gate]()
        num_bytes, calls = len(keys) * self.serializer.record_bytes, list[Future[bool]]()
        for block in self.blocks(keys, pages):
            gates.append(Gate())
            task = partial(self._load_block, *block, ready, gates[-1])
            calls.append(self._workers.submit(task))
        limit_s = self.health.limit_s(num_bytes)
        end = began + limit_s
        if not all(self.health.result(call, end, limit_s) is True for call in calls):
            for gate in gates:
                gate.close()
            self.counters.add(failed_loads=1)
            logger.warning(
                "hisparse: storage: %d pages could not be loaded; %s", len(keys), self.otherwise
            )
            return False
        took_ms = round(1000 * (time.monotonic() - began))
        self.counters.add(loaded_pages=len(keys), loaded_bytes=num_bytes, load_ms=took_ms)
        return True

    def load_found(self, names: Sequence[str], pages: Tensor, ready: Sequence[Any]) -> Tensor:
        """Load the records that are stored; the arguments are those of :meth:`load`.

        Returns:
            The host pages ``[n] int64`` of the other records.
        """
        found = self.find(names)
        num_pages = found * self.serializer.pages_per_record
        loaded = found and self.load(names[:found], pages[:num_pages], ready)
        return pages[num_pages:] if loaded else pages

    def _load_block(self, keys: Keys, pages: Tensor, ready: Sequence[Any], gate: Gate) -> bool:
        """Read one block of records and, if all are whole, move them to host ``pages [P]``."""
        if gate.closed:
            return False
        buffer = self.storage.buffer
        block = buffer.take(self.health.timeout_s)
        if block is None:
            raise TimeoutError("late calls hold all memory for records")
        try:
            found = self.storage.get(keys, buffer.rows(block, len(keys)))
            if not all(found):
                self.lost.add(key for key, ok in zip(keys, found, strict=True) if not ok)
                self.counters.add(damaged_pages=found.count(False), lost_pages=found.count(None))
                return False
            for event in ready:
                event.synchronize()
            with gate.enter() as admitted:
                if admitted:
                    self.serializer.write(pages, self._data(block, len(keys)))
            return admitted
        finally:
            buffer.give(block)

    def blocks(self, keys: Keys, pages: Tensor) -> Iterator[tuple[Keys, Tensor]]:
        """Cut records and their host pages ``[records * pages_per_record]`` into blocks."""
        rows, per_record = self.storage.buffer.block_rows, self.serializer.pages_per_record
        for first in range(0, len(keys), rows):
            end = first + rows
            yield keys[first:end], pages[first * per_record : end * per_record]

    def copy_from_pool(self, pages: Tensor, block: int) -> None:
        """Copy host pages ``[records * pages_per_record]`` to the records of a block."""
        count = len(pages) // self.serializer.pages_per_record
        self.serializer.read(pages, self._data(block, count))

    def _data(self, block: int, count: int) -> Tensor:
        """The first ``count`` records of a block, ``[count, record_bytes] uint8``."""
        rows = self.storage.buffer.rows(block, count)
        return self.storage.buffer.data[rows.start : rows.stop, : self.serializer.record_bytes]

    def put(self, keys: Keys, block: int) -> bool:
        """Store the records of a block, and free it; whether all of them are stored then.

        A call that is late keeps the block until it ends.
        """
        buffer = self.storage.buffer
        try:
            return self.storage.put(keys, buffer.rows(block, len(keys)))
        finally:
            buffer.give(block)

    def close(self) -> None:
        """End the threads; the store stays open."""
        self._workers.close()
