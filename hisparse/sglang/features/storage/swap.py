"""Retracted requests: their pages are written to the store, and read back when they resume."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hisparse.cache.shareable_pages import ShareablePages
from hisparse.errors import one_line
from hisparse.options import StorageOptions
from hisparse.sglang.features.storage.calls import Workers
from hisparse.sglang.features.storage.key import StorageState
from hisparse.sglang.features.storage.records import RecordStore
from hisparse.sglang.session import current_state
from hisparse.storage import FileStore

if TYPE_CHECKING:
    from hisparse.storage.managed import ManagedStore

logger = logging.getLogger("hisparse")

#: Pages that a server could not remove, because it was killed, are removed by one that starts or
#: swaps when they have not been used for so many seconds. It looks for them once in an hour.
_ABANDONED_S, _CLEANING_S = 86400.0, 3600.0


@dataclass(eq=False)
class _Swapped:
    """Pages of a request that is swapped out.

    Attributes:
        names: of the records, in order, unique to the request, by the hash of a page's tokens and
            of all earlier ones.
        exact: ``[records, host pages of a record] bool``, the flags of the host pages.
    """

    names: dict[str, str]
    exact: Tensor


class RequestSwap:
    """Writes pages of requests that lose their host slots, and reads them when they come back.

    What fails or is late is computed instead. The scheduler's thread makes all calls.

    Args:
        records: of swapped pages, in a namespace of their own.
        remover: the store that they are in.
        exact: flags of pages, which come back with them.
    """

    def __init__(
        self, records: RecordStore, remover: FileStore | ManagedStore, exact: ShareablePages
    ) -> None:
        self._records, self._remover = records, remover
        self._health, self._counters = records.health, records.counters
        self._exact = exact
        # One thread: pages are removed after late calls have written them.
        self._workers = Workers(1, "hisparse-swap")
        self._server, self._numbers = secrets.token_hex(16), itertools.count()
        self._out: dict[str, _Swapped] = {}
        self._cleaned_at = -math.inf
        self._clean()

    def swap_out(
        self, request: Any, hashes: Sequence[str], pages: Tensor, ready: Sequence[Any]
    ) -> bool:
        """Write pages of a request; whether they can be read back until it ends.

        Args:
            request: has an id ``rid``. Its pages are removed when nobody holds it any more.
            hashes: of the pages' tokens and of all before them, as lookups have them.
            pages: ``[records * pages_per_record] int64``, host pages; nothing reads them after the
                call.
            ready: events after which no forward writes to the host pages.
        """
        self.drop(request.rid)
        self._clean()
        if not self._health.is_usable(self._workers):
            self._counters.add(failed_swaps=1)
            return False
        for event in ready:
            event.synchronize()
        swapped = _Swapped(
            {name: f"{self._server}{next(self._numbers):016x}" for name in hashes},
            self._exact.read(pages).view(len(hashes), -1),
        )
        if not self._write([*swapped.names.values()], pages):
            self._counters.add(failed_swaps=1)
            self._remove_later(self._records.namespace, [*swapped.names.values()])
            return False
        self._out[request.rid] = swapped
        # However the request ends, SGLang lets go of it.
        weakref.finalize(request, self._end, request.rid, swapped).atexit = False
        self._counters.add(swapped_pages=len(hashes))
        return True

    def first(self, rid: str, hashes: Sequence[str]) -> int:
        """Index of the first page among ``hashes`` that the request has swapped; else their number.

        The pages from there on are looked up and loaded here.
        """
        if (swapped := self._out.get(rid)) is None:
            return len(hashes)
        return next((i for i, name in enumerate(hashes) if name in swapped.names), len(hashes))

    def find(self, rid: str, hashes: Sequence[str]) -> int:
        """Length of the longest prefix of ``hashes`` that can be loaded for a request."""
        return self._records.find(self._names(rid, hashes))

    def load(self, rid: str, hashes: Sequence[str], pages: Tensor, ready: Sequence[Any]) -> bool:
        """Load swapped pages and their flags; whether all have arrived. They leave the store.

        Args:
            rid: id of the request.
            hashes: of pages that were found.
            pages: ``[records * pages_per_record] int64``, host pages; after False nothing writes
                to them any more.
            ready: events after which no forward writes to the host pages.
        """
        names, swapped = self._names(rid, hashes), self._out.get(rid)
        landed = len(names) == len(hashes) and self._records.load(names, pages, ready)
        if swapped is not None and landed:
            first = list(swapped.names).index(hashes[0])
            self._exact.write(pages, swapped.exact[first : first + len(hashes)].flatten())
            self._counters.add(swapped_in_pages=len(hashes))
        else:
            self._counters.add(failed_swaps=1)
        self.drop(rid)
        return landed

    def drop(self, rid: str) -> None:
        """Remove the pages of a request, if it has swapped some."""
        swapped = self._out.pop(rid, None)
        if swapped is not None:
            self._remove_later(self._records.namespace, [*swapped.names.values()])

    def reset(self) -> None:
        """Remove all pages."""
        for rid in list(self._out):
            self.drop(rid)

    def close(self) -> None:
        """Remove all pages, in at most the time limit of a call, and end the threads."""
        if self._out:
            self.reset()
            self._health.call(self._workers, lambda: None)
        self._records.close()
        self._workers.close()

    def _names(self, rid: str, hashes: Sequence[str]) -> list[str]:
        """Names of the records of the longest prefix of ``hashes`` that the request has swapped."""
        names = swapped.names if (swapped := self._out.get(rid)) else {}
        return [names[each] for each in itertools.takewhile(names.__contains__, hashes)]

    def _write(self, names: Sequence[str], pages: Tensor) -> bool:
        """Copy ``pages [P] int64`` out of the KV pool, and write them; whether all are in time."""
        records, keys = self._records, self._records.keys(names)
        limit_s = self._health.limit_s(len(keys) * records.serializer.record_bytes)
        end, calls = time.monotonic() + limit_s, list[Future[bool]]()
        for part, part_pages in records.blocks(keys, pages):
            # Loads need blocks too, also while the store hangs.
            if len(calls) > 1 and self._health.result(calls[-2], end, limit_s) is not True:
                return False
            block = records.storage.buffer.take(max(0.0, end - time.monotonic()))
            if block is None:
                return False
            records.copy_from_pool(part_pages, block)
            calls.append(self._workers.submit(partial(records.put, part, block)))
        return all(self._health.result(call, end, limit_s) is True for call in calls)

    def _end(self, rid: str, swapped: _Swapped) -> None:
        """Remove the pages of a request that has ended, unless they were loaded or replaced."""
        # Any thread may collect the garbage.
        if self._out.get(rid) is swapped:
            self.drop(rid)

    def _clean(self) -> None:
        """Remove what killed servers have left, at most once in an hour."""
        if time.monotonic() - self._cleaned_at > _CLEANING_S:
            self._cleaned_at = time.monotonic()
            self._remove_later(self._records.namespace, unused_s=_ABANDONED_S)

    def _remove_later(self, *which: Any, **rule: Any) -> None:
        """Call :meth:`FileStore.remove` in the thread of writes."""
        self._workers.submit(partial(self._remove_now, *which, **rule))

    def _remove_now(self, *which: Any, **rule: Any) -> None:
        try:
            self._remover.remove(*which, **rule)
        except Exception as error:
            self._counters.add(errors=1)
            logger.warning("hisparse: storage: pages were not removed: %s", one_line(error))


def around_release_req(
    original: Callable[..., bool], *, req: Any, offload_kv: bool = True, **others: Any
) -> bool:
    """Offer the pages of a retracted request to the storage, before SGLang frees them.

    SGLang clears ``offload_kv`` for a request that does not come back, or that it pauses while
    weights change.
    """
    state = current_state(StorageState)
    if state is not None and state.swap_out is not None and offload_kv:
        state.swap_out(req)
    return original(req=req, offload_kv=offload_kv, **others)


def make_swap(
    records: RecordStore, exact: ShareablePages, options: StorageOptions
) -> RequestSwap | None:
    """What keeps pages of retracted requests in the store of ``records``; None: nothing does.

    The pages are in a namespace of their own, under names of one server.
    """
    if options.swap_min_tokens is None:
        return None
    assert records.namespace is not None, "it is set before"
    if (remover := records.storage.remover) is None:
        logger.info(
            "hisparse: storage: backend %s does not remove pages; retracted requests are computed",
            options.backend,
        )
        return None
    own = replace(records.namespace, model="retracted requests")
    return RequestSwap(records.within(own), remover, exact)
