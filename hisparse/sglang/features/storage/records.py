"""Records of one kind in a store, and what moves them between the store and the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final, Protocol

from torch import Tensor

from hisparse.sglang.features.storage.calls import StorageHealth
from hisparse.sglang.features.storage.page_storage import PageStorage, RecordBuffer
from hisparse.sglang.features.storage.state import StorageCounters
from hisparse.storage import Namespace

#: Seconds for which a record counts as absent, and the most such records.
_SECONDS: Final = 60.0
_MAX_KEYS: Final = 65536


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
            for key in keys if len(self._until) < _MAX_KEYS else ():
                self._until.pop(key, None)  # The oldest stay first.
                self._until[key] = until

    def drop(self, keys: Iterable[str]) -> None:
        """Forget records that were written again."""
        with self._lock:
            for key in keys if self._until else ():
                self._until.pop(key, None)

    def first(self, keys: Sequence[str]) -> int:
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


class RecordFormat(Protocol):
    """Moves what belongs to host pages to the bytes of records, and back.

    Attributes:
        pages_per_record: host pages of a record.
        record_bytes: bytes of a record.
    """

    pages_per_record: int
    record_bytes: int

    def read(self, pages: Tensor, out: Tensor) -> None:
        """Copy host pages ``[n * pages_per_record] int64`` to ``out [n, bytes] uint8``."""

    def write(self, pages: Tensor, data: Tensor) -> None:
        """Copy records ``data [n, bytes] uint8`` to host pages ``[n * pages_per_record] int64``."""


@dataclass(frozen=True, kw_only=True)
class RecordStore:
    """Records of one kind.

    Attributes:
        storage: the store, with their namespace in use.
        form: moves them.
        buffer: memory for them on their way.
        health: time limits.
        counters: counts.
        lost: those that the store has and that could not be read.
    """

    storage: PageStorage
    form: RecordFormat
    buffer: RecordBuffer
    health: StorageHealth
    counters: StorageCounters
    lost: LostKeys = field(default_factory=LostKeys)

    def within(self, namespace: Namespace) -> RecordStore:
        """Records of the same form in another namespace."""
        return replace(self, storage=self.storage.within(namespace), lost=LostKeys())
