"""Writes pages of the KV pool to a store."""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor

from hisparse.cache.shareable_pages import ShareablePages
from hisparse.errors import one_line
from hisparse.sglang.features.storage.calls import Gate, Workers
from hisparse.sglang.features.storage.pages import Keys
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
        stored: whether the store has all pages that it may have.
    """

    keys: Keys
    pages: Tensor
    ready: Sequence[Any]
    gate: Gate = field(default_factory=Gate)
    stored: Future[bool] = field(default_factory=Future)


class PageWriter:
    """Copies pages out of the KV pool and puts them into a store, in the order of calls.

    Args:
        records: of the pages.
        exact: says which pages may be shared.
        max_pages: most pages that may wait, since the radix cache cannot evict them. A call that
            finds none waiting is accepted whatever its size.
    """

    def __init__(self, records: RecordStore, exact: ShareablePages, max_pages: int) -> None:
        self._records = records
        self._exact = exact
        self._max_pages = max_pages
        self._calls = Workers(1, "hisparse-put")
        self._copies = Workers(1, "hisparse-offload")
        self._jobs: deque[_Job] = deque()

    def add(self, names: Sequence[str], pages: Tensor, ready: Sequence[Any]) -> None:
        """Write records, later. Each call ends, in order; see :meth:`num_done` and :meth:`pop`.

        Args:
            names: of the records, in the namespace that is in use now.
            pages: ``[records * pages_per_record] int64``, host pages.
            ready: events after which the pages are written.
        """
        job = _Job(self._records.keys(names), pages, ready)
        waiting = sum(len(each.pages) for each in self._jobs if not each.stored.done())
        self._jobs.append(job)
        refused = waiting > 0 and waiting + len(pages) > self._max_pages
        if refused or not self._may_call(job):
            self._end(job, stored=False)
        else:
            self._copies.submit(partial(self._run, job))

    def num_done(self) -> int:
        """Calls at the head of the line that have ended."""
        return sum(1 for _ in takewhile(lambda job: job.stored.done(), self._jobs))

    def pop(self) -> bool:
        """Result of the oldest call: False if pages that may be stored were not."""
        return self._jobs.popleft().stored.result()

    def reset(self) -> None:
        """Forget all calls; when it returns, no thread reads the KV pool."""
        jobs = list(self._jobs)
        self._jobs.clear()
        for job in jobs:
            job.gate.close()

    def drain(self, timeout_s: float) -> None:
        """Wait until all calls have ended, or the time is over."""
        wait([job.stored for job in self._jobs], timeout_s)

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
            self._records.counters.add(errors=1)
            logger.warning("hisparse: storage: pages were not written: %s", one_line(error))
        finally:
            self._end(job, stored=stored)

    def _end(self, job: _Job, *, stored: bool) -> None:
        if not stored and not job.gate.closed:
            self._records.counters.add(failed_offloads=1)
        job.stored.set_result(stored)

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
        records, num_exact = self._records, [*flags, False].index(False)
        records.counters.add(inexact_pages=len(flags) - num_exact)
        keys = job.keys[:num_exact]
        if not keys:
            return True
        known = records.health.call(self._calls, lambda: records.storage.find(keys))
        if known is None:
            return False
        known = min(known, records.lost.first(keys))
        records.counters.add(known_pages=known)
        per_record = records.serializer.pages_per_record
        pages = job.pages[known * per_record : num_exact * per_record]
        return all(self._store_block(job, *block) for block in records.blocks(keys[known:], pages))

    def _may_call(self, job: _Job) -> bool:
        """Whether the store is usable. Behind one that hangs, jobs end and unlock their pages."""
        return not job.gate.closed and self._records.health.is_usable(self._calls)

    def _store_block(self, job: _Job, keys: Keys, pages: Tensor) -> bool:
        """Copy records of a job from host pages ``[records * pages_per_record]``, then put them."""
        records, buffer = self._records, self._records.storage.buffer
        block = buffer.take(records.health.timeout_s) if self._may_call(job) else None
        if block is None:
            return False
        with job.gate.enter() as admitted:
            if admitted:
                records.copy_from_pool(pages, block)
        if not admitted:
            buffer.give(block)
            return False

        def put() -> bool:
            if job.gate.closed:
                buffer.give(block)
                return False
            return records.put(keys, block)

        num_bytes = len(keys) * records.serializer.record_bytes
        if not records.health.call(self._calls, put, num_bytes):
            return False
        records.lost.drop(keys)
        records.counters.add(offloaded_pages=len(keys), offloaded_bytes=num_bytes)
        return True
