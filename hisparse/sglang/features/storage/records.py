"""Records of one kind in a store, and what moves them between the store and the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

from torch import Tensor

from hisparse.cache.serializer import EntrySerializer, PageSerializer
from hisparse.sglang.features.storage.calls import StorageCounters, StorageHealth
from hisparse.sglang.features.storage.pages import BackendPages, FilePages, Keys
from hisparse.storage import Namespace

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
    """Records of one kind.

    Callers ask for the keys of pages once, when they learn of the pages: the namespace changes with
    the model's weights, and pages stay those of the weights that computed them.

    Attributes:
        storage: the store.
        serializer: moves them to and from host pages, ``pages_per_record`` each.
        health: time limits.
        counters: counts.
        namespace: of :meth:`keys` from now on; None: not known yet.
        lost: those that the store has and that could not be read.
    """

    storage: FilePages | BackendPages
    serializer: PageSerializer | EntrySerializer
    health: StorageHealth
    counters: StorageCounters
    namespace: Namespace | None = None
    lost: LostKeys = field(default_factory=LostKeys)

    def within(self, namespace: Namespace, **changes: Any) -> RecordStore:
        """Records in another namespace of the store."""
        return replace(self, namespace=namespace, lost=LostKeys(), **changes)

    def keys(self, pages: Sequence[str]) -> Keys:
        """Keys of pages of the namespace that is in use."""
        assert self.namespace is not None, "a namespace is set before its keys are asked for"
        return Keys(self.namespace, pages)

    def blocks(self, keys: Keys, pages: Tensor) -> Iterator[tuple[Keys, Tensor]]:
        """Cut records and their host pages ``[records * pages_per_record]`` into blocks."""
        rows, per_record = self.storage.buffer.block_rows, self.serializer.pages_per_record
        for first in range(0, len(keys), rows):
            end = first + rows
            yield keys[first:end], pages[first * per_record : end * per_record]

    def copy_from_pool(self, pages: Tensor, block: int) -> None:
        """Copy host pages ``[records * pages_per_record]`` to the records of a block."""
        self.serializer.read(pages, self._data(block, pages))

    def copy_to_pool(self, block: int, pages: Tensor) -> None:
        """Copy the records of a block to host pages ``[records * pages_per_record]``."""
        self.serializer.write(pages, self._data(block, pages))

    def _data(self, block: int, pages: Tensor) -> Tensor:
        """The records of a block, ``[records, record_bytes] uint8``."""
        buffer = self.storage.buffer
        rows = buffer.rows(block, len(pages) // self.serializer.pages_per_record)
        return buffer.data[rows.start : rows.stop, : self.serializer.record_bytes]

    def get(self, keys: Keys, block: int) -> bool:
        """Read records into a block; whether all are whole."""
        found = self.storage.get(keys, self.storage.buffer.rows(block, len(keys)))
        if all(found):
            return True
        self.lost.add(key for key, ok in zip(keys, found, strict=True) if not ok)
        self.counters.add(damaged_pages=found.count(False), lost_pages=found.count(None))
        return False

    def put(self, keys: Keys, block: int) -> bool:
        """Store the records of a block, and free it; whether all of them are stored then.

        A call that is late keeps the block until it ends.
        """
        buffer = self.storage.buffer
        try:
            return self.storage.put(keys, buffer.rows(block, len(keys)))
        finally:
            buffer.give(block)
