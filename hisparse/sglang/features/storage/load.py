"""Finds pages in a store, and loads them into the KV pool: all of a request's, or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from hisparse.sglang.features.storage.calls import Gate, Workers
from hisparse.sglang.features.storage.records import RecordStore

logger = logging.getLogger("hisparse")


class PageLoader:
    """Reads pages for requests that wait to be admitted.

    A load ends before its request is admitted. So whatever a store does, a request either has all
    of its pages, checked, or computes its prompt, and no other request learns of it.

    Args:
        records: of the pages.
        threads: blocks of records that are read at a time.
        otherwise: what happens to pages that could not be loaded, for the log.
    """

    def __init__(
        self, records: RecordStore, threads: int, otherwise: str = "their request computes them"
    ) -> None:
        self._otherwise = otherwise
        self._storage = records.storage
        self._format = records.form
        self._buffer = records.buffer
        self._health = records.health
        self._counters = records.counters
        self._lost = records.lost
        self._workers = Workers(threads, "hisparse-load")

    def find(self, names: Sequence[str]) -> int:
        """Length of the longest prefix of the pages ``names`` that can be loaded."""
        keys, found = self._storage.keys(names), 0
        if keys and self._health.is_usable(self._workers):
            found = self._health.call(self._workers, lambda: self._storage.find(keys)) or 0
            found = self._lost.first(keys[:found])
        self._counters.add(found_pages=found, absent_pages=len(keys) - found)
        return found

    def load(self, names: Sequence[str], pages: Tensor, ready: Sequence[Any]) -> bool:
        """Load records; whether all have arrived whole, and in time.

        Args:
            names: of the records, in the namespace that is in use.
            pages: ``[records * pages_per_record] int64``, host pages; after False nothing writes
                to them any more.
            ready: events after which no forward writes to the host pages.
        """
        if not self._health.is_usable(self._workers):
            self._counters.add(failed_loads=1)
            return False
        began, gate, keys = time.monotonic(), Gate(), self._storage.keys(names)
        num_bytes = len(keys) * self._format.record_bytes
        limit_s = self._health.limit_s(num_bytes)
        rows, per_record = self._buffer.block_rows, self._format.pages_per_record
        calls = [
            self._workers.submit(
                partial(
                    self._load_block,
                    keys[first : first + rows],
                    pages[first * per_record : (first + rows) * per_record],
                    ready,
                    gate,
                )
            )
            for first in range(0, len(keys), rows)
        ]
        end = began + limit_s
        landed = all(self._health.result(call, end, limit_s) is True for call in calls)
        if not landed:
            gate.close()
            self._counters.add(failed_loads=1)
            logger.warning(
                "hisparse: storage: %d pages could not be loaded; %s", len(keys), self._otherwise
            )
            return False
        took_ms = round(1000 * (time.monotonic() - began))
        self._counters.add(loaded_pages=len(keys), loaded_bytes=num_bytes, load_ms=took_ms)
        return True

    def _load_block(
        self, keys: Sequence[str], pages: Tensor, ready: Sequence[Any], gate: Gate
    ) -> bool:
        """Read one block of records and, if all are whole, move them into the KV pool."""
        if gate.closed:
            return False
        block = self._buffer.take(self._health.timeout_s)
        if block is None:
            raise TimeoutError("late calls hold all memory for records")
        try:
            rows = self._buffer.rows(block, len(keys))
            found = self._storage.get(keys, rows)
            if not all(found):
                self._note_lost(keys, found)
                return False
            for event in ready:
                event.synchronize()
            with gate.enter() as admitted:
                if admitted:
                    data = self._buffer.data[rows.start : rows.stop, : self._format.record_bytes]
                    self._format.write(pages, data)
            return admitted
        finally:
            self._buffer.give(block)

    def _note_lost(self, keys: Sequence[str], found: Sequence[bool | None]) -> None:
        self._lost.add(key for key, ok in zip(keys, found, strict=True) if not ok)
        self._counters.add(damaged_pages=found.count(False), lost_pages=found.count(None))

    def close(self) -> None:
        """End the threads."""
        self._workers.close()
