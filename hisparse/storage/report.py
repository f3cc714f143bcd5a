"""What a store says about itself."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from hisparse.storage.namespace import Namespace

_COUNTERS: Final = (
    "hits", "misses", "read_bytes", "puts", "put_bytes", "duplicates", "damaged", "read_errors",
    "refused_size", "refused_read_only", "refused_disk", "evicted", "collected_bytes",
    "index_errors",
)  # fmt: skip

#: Seconds between lines of the log.
_QUIET_S: Final = 60.0


class StoreCounters:
    """What :attr:`FileStore.counters` says. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._counts, self._lock = Counter[str](), threading.Lock()
        self._log_after: dict[str, float] = {}

    def add(self, **more: int) -> None:
        """Add to counters by name."""
        with self._lock:
            self._counts.update(more)

    def may_log(self, kind: str) -> bool:
        """Whether a line may be logged: one of each kind a minute; a bad disk fills no log."""
        with self._lock:
            now = time.monotonic()
            if now < self._log_after.get(kind, now):
                return False
            self._log_after[kind] = now + _QUIET_S
            return True

    def all(self) -> dict[str, int]:
        """Every counter by name."""
        with self._lock:
            return {name: self._counts[name] for name in _COUNTERS}


@dataclass(frozen=True, kw_only=True)
class NamespaceUse:
    """What a store holds of one namespace.

    Attributes:
        namespace: the namespace.
        pages: number of pages.
        bytes: bytes of their records in the segments.
        last_used: when a page was last written or read, in seconds since 1970.
    """

    namespace: Namespace
    pages: int
    bytes: int
    last_used: float


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """What a store holds.

    Attributes:
        path: the folder.
        pages: number of pages.
        live_bytes: bytes of their records.
        segment_bytes: bytes of all segments, live or not.
        segments: number of segments.
        namespaces: by namespace, the most bytes first.
    """

    path: str
    pages: int
    live_bytes: int
    segment_bytes: int
    segments: int
    namespaces: tuple[NamespaceUse, ...]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A record that cannot be read.

    Attributes:
        segment: name of the file.
        offset: of the record in the file, in bytes.
        key: the page's key, hexadecimal.
        reason: "short", "header", "size", "checksum of part N", "no such segment", "unknown
            namespace" or the system's error.
    """

    segment: str
    offset: int
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What :meth:`FileStore.verify` found.

    Attributes:
        pages: records read.
        bytes: their bytes.
        damaged: records that were dropped from the index.
    """

    pages: int
    bytes: int
    damaged: tuple[Damage, ...]
