"""Records of one kind in a store, and what moves them between the store and the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from hisparse.sglang.features.storage.counters import StorageCounters
from hisparse.sglang.features.storage.health import StorageHealth
from hisparse.sglang.features.storage.page_storage import PageStorage, Staging
from hisparse.sglang.features.storage.unread import UnreadKeys
from hisparse.storage import Namespace

__all__ = ["RecordFormat", "Records"]


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
class Records:
    """Records of one kind.

    Attributes:
        storage: the store, with their namespace in use.
        form: moves them.
        staging: memory for them on their way.
        health: time limits.
        counters: counts.
        unread: those that the store has and that could not be read.
    """

    storage: PageStorage
    form: RecordFormat
    staging: Staging
    health: StorageHealth
    counters: StorageCounters
    unread: UnreadKeys = field(default_factory=UnreadKeys)

    def within(self, namespace: Namespace) -> Records:
        """Records of the same form in another namespace."""
        return replace(self, storage=self.storage.within(namespace), unread=UnreadKeys())
