"""How large a store may grow, and which pages leave first."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hisparse.errors import ConfigError, quoted, unknown_name
from hisparse.units import MemorySize, parse_memory

#: Which pages leave first when the store is full: the least recently used, the least often used,
#: or, after those that nobody used for ``ttl_s``, the least recently used.
POLICIES: Final = ("lru", "lfu", "ttl")


@dataclass(frozen=True)
class StoreLimits:
    """How large a store may grow, and which pages leave first; see :class:`FileStore`.

    Raises:
        ConfigError: a value is out of range.
    """

    size_bytes: int | None
    policy: str
    ttl_s: float | None
    high_water: float
    low_water: float

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(unknown_name("policy", self.policy, POLICIES))
        if self.size_bytes is not None and not 0 < self.size_bytes < 2**63:
            got = quoted(self.size_bytes)
            raise ConfigError(f"size_bytes: got {got}, expected more than 0, below 8 EiB")
        if not 0 < self.low_water <= self.high_water <= 1:
            got = f"low_water {self.low_water} and high_water {self.high_water}"
            raise ConfigError(f"got {got}, expected 0 < low_water <= high_water <= 1")
        if self.policy == "ttl":
            if self.ttl_s is None or not (self.ttl_s > 0 and math.isfinite(self.ttl_s)):
                got = quoted(self.ttl_s)
                raise ConfigError(f"ttl_s: got {got}, expected seconds above 0 for policy 'ttl'")
        elif self.ttl_s is not None:
            got = f"ttl_s {self.ttl_s} with policy {self.policy!r}"
            raise ConfigError(f"got {got}, expected it with policy 'ttl' alone")

    @property
    def default_segment_bytes(self) -> int:
        """1/64 of the size, so that little space waits in unfinished segments."""
        return min(max((self.size_bytes or 2**63) // 64, 4 << 20), 1 << 30)

    def used_since(self, now: float) -> float:
        """Pages that were last used before this time are expired."""
        return 0.0 if self.ttl_s is None else now - self.ttl_s


def size_in_bytes(key: str, size: MemorySize | None, folder: Path) -> int | None:
    """The limit of a store in bytes; None: no limit.

    Args:
        key: name of the setting, for messages.
        size: the setting; a fraction is of the file system's size.
        folder: of the store, which need not exist.

    Raises:
        ConfigError: the value is neither a size nor a fraction.
    """
    parsed = None if size is None else parse_memory(key, size)
    if isinstance(parsed, float):
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        return int(parsed * shutil.disk_usage(existing).total)
    return parsed
