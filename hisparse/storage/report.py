"""What a store says about itself."""

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hisparse.storage.namespace import Namespace

logger = logging.getLogger(__name__)

_COUNTERS: Final = (
    "hits", "misses", "read_bytes", "puts", "put_bytes", "duplicates", "damaged", "read_errors",
    "refused_size", "refused_read_only", "refused_disk", "evicted", "collected_bytes",
)  # fmt: skip

#: Seconds between lines of the log.
_QUIET_S: Final = 60.0


class StoreCounters:
    """What :attr:`FileStore.counters` says, and the log. Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self._path, self._counts, self._lock = path, Counter[str](), threading.Lock()
        self._log_after: dict[str, float] = {}

    def add(self, **more: int) -> None:
        """Add to counters by name."""
        with self._lock:
            self._counts.update(more)

    def warn(self, kind: str, text: str) -> None:
        """Log one line of each kind a minute: a bad disk fills no log."""
        with self._lock:
            now = time.monotonic()
            if now < self._log_after.get(kind, now):
                return
            self._log_after[kind] = now + _QUIET_S
        logger.warning("store %s: %s", self._path, text)

    def all(self) -> dict[str, int]:
        """Every counter by name."""
        with self._lock:
            return {name: self._counts[name] for name in _COUNTERS}


@dataclass(frozen=True, kw_only=True)
class NamespaceUse:
    """What a store holds of one namespace."""

    namespace: Namespace
    pages: int
    #: On the disk.
    bytes: int
    #: When a page was last written or read, in seconds since 1970.
    last_used: float


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """What the store in the folder ``path`` holds: pages, and their bytes on the disk."""

    path: str
    pages: int
    bytes: int
    #: The most bytes first, without those whose ``namespace.json`` is lost.
    namespaces: tuple[NamespaceUse, ...]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A page that was removed: keys of its namespace and its own, and what was wrong.

    The reason is "short", "checksum", or what the system said.
    """

    namespace: str
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The pages that :meth:`FileStore.verify` read, their bytes, and those that it removed."""

    pages: int
    bytes: int
    damaged: tuple[Damage, ...]
