"""A storage backend of SGLang's in memory that fails as it is told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

__all__ = ["ByIndex", "FakeBackend"]


class FakeBackend(HiCacheStorage):  # type: ignore[misc]
    """A dictionary.

    Attributes:
        records: by key.
        fault: "" or what goes wrong: "hang" in every call until :attr:`woken`, "raise" in every
            call, "absent" records that were found, "short", "flip" a bit, "refuse" to store.
        hit: number of the get from which on the fault happens.
    """

    def __init__(self) -> None:
        self.records: dict[str, Tensor] = {}
        self.fault = ""
        self.hit = 0
        self.gets = 0
        self.puts: list[str] = []
        self.woken = threading.Event()

    def _begin(self) -> None:
        if self.fault == "hang":
            self.woken.wait(60)
        if self.fault == "raise":
            raise OSError("the store is gone\nin two lines")

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        if self.fault != "raise in get":
            self._begin()
        return next((i for i, key in enumerate(keys) if key not in self.records), len(keys))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        self._begin()
        self.gets += 1
        record = self.records.get(key)
        if record is None:
            return None
        target_location.copy_(record)
        if self.gets > self.hit:
            if self.fault == "absent":
                return None
            if self.fault == "short":
                target_location[len(record) // 2 :] = 0
            if self.fault == "flip":
                target_location[self.gets % len(record)] ^= 1 << self.gets % 8
            if self.fault == "other record":
                target_location.copy_(next(x for k, x in self.records.items() if k != key))
        return target_location

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        return [self.get(*pair) for pair in zip(keys, target_locations, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        self._begin()
        if self.fault == "refuse":
            return False
        self.puts.append(key)
        self.records[key] = value.clone()
        return True

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all([self.set(*pair) for pair in zip(keys, values, strict=True)])

    def exists(self, key: str) -> bool:
        return key in self.records


class ByIndex(FakeBackend):
    """The same through ``batch_get_v1``, which names rows of the host pool."""

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        rows = [self.mem_pool_host.get_data_page(i) for i in host_indices.tolist()]
        return [x is not None for x in self.batch_get(keys, rows)]

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        rows = [self.mem_pool_host.get_data_page(i) for i in host_indices.tolist()]
        return [self.set(*pair) for pair in zip(keys, rows, strict=True)]
