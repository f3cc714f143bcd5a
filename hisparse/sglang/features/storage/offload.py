"""Writes pages of the KV pool to a store, beside the scheduler and in the order of its calls."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from hisparse.cache.shareable_pages import ShareablePages
from hisparse.errors import one_line
from hisparse.sglang.features.storage.calls import Gate, Workers
from hisparse.sglang.features.storage.page_storage import Keys
from hisparse.sglang.features.storage.records import RecordStore

logger = logging.getLogger("hisparse")


@dataclass(eq=False)
class _Job:
    """Pages of one call.

    Attributes:
        keys: of the records.
        pages: ``[records * pages_per_record] int64``, host pages.
        ready: events after which the pages are written.
        gate: closed when the pages may change.
        stored: whether the store has all pages that it may have; None: not known yet.
    """

    keys: Keys
    pages: Tensor
    ready: Sequence[Any]
    gate: Gate = field(default_factory=Gate)
    stored: bool | None = None


class PageWriter:
    """Copies pages out of the KV pool and puts them into a store.

    Args:
        records: of the pages.
        exact: says which pages may be shared.
        max_pages: most pages that may wait, since the radix cache cannot evict them. A call that
            finds none waiting is accepted whatever its size.
    """

    def __init__(self, records: RecordStore, exact: ShareablePages, max_pages: int) -> None:
        self._storage = records.storage
        self._format = records.form
        self._buffer = records.buffer
        self._health = records.health
        self._counters = records.counters
        self._lost = records.lost
        self._exact = exact
        self._max_pages = max_pages
        self._calls = Workers(1, "hisparse-put")
        self._copies = Workers(1, "hisparse-offload")
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()

    def add(self, names: Sequence[str], pages: Tensor, ready: Sequence[Any]) -> None:
        """Write records, later. Each call ends, in order; see :meth:`num_done` and :meth:`pop`.

        Args:
            names: of the records, in the namespace that is in use now.
            pages: ``[records * pages_per_record] int64``, host pages.
            ready: events after which the pages are written.
        """
        job = _Job(self._storage.keys(names), pages, ready)
        with self._changed:
            waiting = sum(len(each.pages) for each in self._jobs if each.stored is None)
            refused = waiting > 0 and waiting + len(pages) > self._max_pages
            self._jobs.append(job)
        if refused or not self._health.is_usable(self._calls):
            self._end(job, stored=False)
        else:
            self._copies.submit(partial(self._run, job))

    def num_done(self) -> int:
        """Calls at the head of the line that have ended."""
        done = 0
        for job in list(self._jobs):
            if job.stored is None:
                break
            done += 1
        return done

    def pop(self) -> bool:
        """Result of the oldest call: False if pages that may be stored were not."""
        return bool(self._jobs.popleft().stored)

    def reset(self) -> None:
        """Forget all calls; when it returns, no thread reads the KV pool."""
        jobs = list(self._jobs)
        self._jobs.clear()
        for job in jobs:
            job.gate.close()

    def drain(self, timeout_s: float) -> None:
        """Wait until all calls have ended, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: all(x.stored is not None for x in self._jobs), timeout_s)

    def close(self) -> None:
        """End the threads."""
        self.reset()
        self._copies.close()
        self._calls.close()

    def _run(self, job: _Job) -> None:
        stored = False
        try:
            stored = self._store(job)
        except Exception as error:
            self._counters.add(errors=1)
            logger.warning("hisparse: storage: pages were not written: %s", one_line(error))
        finally:
            self._end(job, stored=stored)

    def _end(self, job: _Job, *, stored: bool) -> None:
        if not stored and not job.gate.closed:
            self._counters.add(failed_offloads=1)
        with self._changed:
            job.stored = stored
            self._changed.notify_all()

    def _store(self, job: _Job) -> bool:
        """Write the exact pages that the store does not have."""
        if not job.keys:
            return True
        if not self._may_call(job):
            return False
        for event in job.ready:
            event.synchronize()
        with job.gate.enter() as admitted:
            if not admitted:
                return False
            flags = self._exact.read(job.pages).view(len(job.keys), -1).all(1).tolist()
        num_exact = next((i for i, exact in enumerate(flags) if not exact), len(flags))
        self._counters.add(inexact_pages=len(flags) - num_exact)
        keys = job.keys[:num_exact]
        if not keys:
            return True
        known = self._health.call(self._calls, lambda: self._storage.find(keys))
        if known is None:
            return False
        known = min(known, self._lost.first(keys))
        self._counters.add(known_pages=known)
        rows = self._buffer.block_rows
        return all(
            self._store_block(job, first, min(first + rows, num_exact))
            for first in range(known, num_exact, rows)
        )

    def _may_call(self, job: _Job) -> bool:
        """Whether the store is usable. Behind one that hangs, jobs end and unlock their pages."""
        return not job.gate.closed and self._health.is_usable(self._calls)

    def _store_block(self, job: _Job, first: int, end: int) -> bool:
        """Copy records ``first`` to ``end`` of a job, then put them."""
        block = self._buffer.take(self._health.timeout_s) if self._may_call(job) else None
        if block is None:
            return False
        rows, per_record = self._buffer.rows(block, end - first), self._format.pages_per_record
        with job.gate.enter() as admitted:
            if admitted:
                pages = job.pages[first * per_record : end * per_record]
                record_bytes = self._format.record_bytes
                data = self._buffer.data[rows.start : rows.stop, :record_bytes]
                self._format.read(pages, data)
        if not admitted:
            self._buffer.give(block)
            return False

        def put() -> bool:
            # A call that is late keeps the block until it ends.
            try:
                return not job.gate.closed and self._storage.put(job.keys[first:end], rows)
            finally:
                self._buffer.give(block)

        num_bytes = (end - first) * self._format.record_bytes
        if not self._health.call(self._calls, put, num_bytes):
            return False
        self._lost.drop(job.keys[first:end])
        self._counters.add(offloaded_pages=end - first, offloaded_bytes=num_bytes)
        return True
