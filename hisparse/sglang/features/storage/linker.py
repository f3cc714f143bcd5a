"""SGLang's external linker: the radix cache's way to a store below host memory.

SGLang's KV locations are host slots, so pages go from the host pool to the store and back, without
another copy in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from torch import Tensor

from hisparse.cache.serializer import PageSerializer
from hisparse.options import StorageOptions
from hisparse.sglang.features.storage.health import StorageHealth
from hisparse.sglang.features.storage.key import make_namespace, model_fingerprint, swap_namespace
from hisparse.sglang.features.storage.load import PageLoader
from hisparse.sglang.features.storage.offload import PageWriter
from hisparse.sglang.features.storage.page_storage import CHECKSUM_BYTES, PageStorage, Staging
from hisparse.sglang.features.storage.ranks import LinkerRanks
from hisparse.sglang.features.storage.records import Records
from hisparse.sglang.features.storage.representations import representation_namespace
from hisparse.sglang.features.storage.setup import create_backend, read_options
from hisparse.sglang.features.storage.stored_representations import (
    StoredRepresentations,
    make_stored_representations,
)
from hisparse.sglang.features.storage.threads import Workers
from hisparse.sglang.features.swap.request_swap import RequestSwap
from hisparse.sglang.features.swap.retracted import RetractedPages
from hisparse.sglang.session import errors_logged, require_session
from hisparse.units import format_bytes

__all__ = ["HiSparseLinker"]

logger = logging.getLogger("hisparse")

#: Bytes of a block: what one call reads or writes.
_BLOCK_BYTES = 8 * 2**20
#: Share of the KV pool that may wait to be written.
_MAX_WAITING = 0.5


class HiSparseLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Finds, loads and stores pages of hisparse's KV pools.

    Args:
        server_args: SGLang's ``ServerArgs``.
        params: SGLang's ``CacheInitParams``.
        components: components of the radix tree; hisparse's pools have one.
        extra_config: the options of the storage.
        forward_stream: the stream of the forwards.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: pool}
        self._session = session = require_session()
        self.layer_done_counter = LayerWiseLoadCounter(session.spec.num_layers)
        self._ranks = LinkerRanks.of(params, shared=pool.host.format.shares_values)
        coordinator = session.coordinator
        assert coordinator is not None, "SGLang builds the attention backend before the cache"
        self._exact, self._loaded = coordinator.share_pages()
        self._serializer = PageSerializer(pool.host, params.page_size, coordinator.stored_entries())
        with errors_logged():
            self._connect(read_options(extra_config), pool.host.num_pages)
        #: Host pages of loads whose forward has not begun, by request.
        self._admitted: dict[str, Tensor] = {}

    def _connect(self, options: StorageOptions, num_pages: int) -> None:
        """Make the store, and the threads that read and write it."""
        record_bytes, checksums = self._serializer.record_bytes, options.backend != "file"
        row_bytes = record_bytes + (CHECKSUM_BYTES if checksums else 0)
        block_rows = max(1, _BLOCK_BYTES // row_bytes)
        # A block for each reader, and two for the writer.
        staging = Staging(options.threads + 2, block_rows, row_bytes)
        backend = create_backend(options, staging, self._ranks.rank, self._ranks.size)
        self._storage = PageStorage(backend, staging, checksums=checksums)
        assert self._session.storage is not None, "the session of a server with a linker counts"
        counters = self._session.storage
        self._health = health = StorageHealth(counters, options.timeout_s)
        self._records = Records(
            storage=self._storage,
            form=self._serializer,
            staging=staging,
            health=health,
            counters=counters,
        )
        max_waiting = int(num_pages * _MAX_WAITING)
        self._loader = PageLoader(self._records, options.threads)
        self._writers = [PageWriter(self._records, self._exact, max_waiting)]
        self._representations: StoredRepresentations | None = None
        self._session.fingerprint = model_fingerprint(self._session)
        self._use_namespace()
        logger.info(
            "hisparse: storage: backend %s, pages of %d tokens and %s in %d parts, timeout_s %g, "
            "staging %s",
            options.backend,
            self._serializer.page_tokens,
            format_bytes(record_bytes),
            len(self._serializer.part_bytes),
            options.timeout_s,
            format_bytes(staging.data.nbytes),
        )
        self._representations = make_stored_representations(
            self._session, options, self._records, self._namespace, self._exact, max_waiting
        )
        if self._representations is not None:
            self._writers.append(self._representations.writer)
        self._swap = self._make_swap(options)
        self._session.swap_out = self._swap_out

    def _make_swap(self, options: StorageOptions) -> RequestSwap | None:
        """What keeps pages of retracted requests; None: they are computed again."""
        if options.swap_min_tokens is None:
            return None
        self._swap_min_tokens = options.swap_min_tokens
        if not self._storage.can_remove:
            logger.info(
                "hisparse: storage: backend %s does not remove pages; retracted requests are "
                "computed",
                options.backend,
            )
            return None
        records = self._records.within(swap_namespace(self._namespace))
        return RequestSwap(records, self._exact, options.threads)

    def _swap_out(self, request: Any) -> None:
        """Write the pages of a retracted request, if they have enough tokens."""
        if self._swap is None or self._rests():
            return
        retracted = RetractedPages.of(request, self._serializer.page_tokens)
        if retracted.num_tokens < max(1, self._swap_min_tokens):
            return
        slots = retracted.slots(self._session.req_to_token_pool.req_to_token)
        pages, ready = self._serializer.host_pages(slots), self.record_offload_ready()
        kept = self._swap.swap_out(request, retracted.hashes(), pages, ready)
        # Until all ranks have read them, none goes on and writes to the pages of a common pool.
        if not self._ranks.all_of(kept):
            self._swap.drop(request.rid)

    def _use_namespace(self) -> None:
        """Address the pages of the weights that the model has now."""
        self._namespace = make_namespace(self._session, self._serializer, self._ranks)
        self._storage.use(self._namespace)
        if (stored := self._representations) is not None:
            size = stored.record_bytes
            stored.use(representation_namespace(self._namespace, self._session, size))
        self._session.storage_rests = False

    def _rests(self) -> bool:
        """Whether the store is not used, on any rank.

        An update can fail on one rank, and flush the others only. So ranks wake together, when the
        first request after the flush comes to them.
        """
        session = self._session
        if session.storage_rests and self._ranks.all_of(session.fingerprint != ""):
            self._use_namespace()
            logger.info("hisparse: storage: in use again, for the weights of the last flush")
        return session.storage_rests

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Length of the longest prefix that every rank can load, in pages of SGLang; [] for none.

        Every shorter one can be loaded too. SGLang would take milliseconds to sort them all.
        """
        if self._rests():
            return []
        found = self._ranks.least_of(self._find(rid, list(_kv(transfers).keys)))
        return [found] if found else []

    def _find(self, rid: str, names: list[str]) -> int:
        """Length of the longest prefix of the pages ``names`` that this rank can load."""
        first = self._first_swapped(rid, names)
        found = self._loader.find(names[:first])
        if found == first and self._swap is not None:
            found += self._swap.find(rid, names[first:])
        return found

    def _first_swapped(self, rid: str, names: Sequence[str]) -> int:
        """Place of the first page that the request itself has swapped; else their number."""
        return len(names) if self._swap is None else self._swap.first(rid, names)

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Load pages into host slots; False: the request computes them.

        The call waits for the store: SGLang cannot take a request back that it has admitted.
        """
        if self._rests():
            return False
        transfer = _kv(transfers)
        pages = self._serializer.host_pages(transfer.device_indices)
        ready = self.record_offload_ready()
        names = list(transfer.keys)
        first = self._first_swapped(rid, names)
        if not self._ranks.all_of(self._load(rid, names, first, pages, ready)):
            return False
        self._add_loaded(names[:first], pages, ready)
        self._admitted[rid] = pages
        return True

    def _load(
        self, rid: str, names: list[str], first: int, pages: Tensor, ready: Sequence[Any]
    ) -> bool:
        """Load ``first`` pages that all servers share, then those of the request itself."""
        end = first * self._serializer.pages_per_record
        if first:
            if not self._loader.load(names[:first], pages[:end], ready):
                return False
            self._exact.set_exact(pages[:end])
        if self._swap is None or first == len(names):
            return True
        return self._swap.load(rid, names[first:], pages[end:], ready)

    def _add_loaded(self, names: list[str], pages: Tensor, ready: Sequence[Any]) -> None:
        """Load the representations of the pages ``names``; the others are built."""
        unbuilt = pages
        if names and self._representations is not None:
            end = len(names) * self._serializer.pages_per_record
            unbuilt = self._representations.load(names, pages[:end], ready)
            unbuilt = torch.cat([unbuilt, pages[end:]])
        built = self._loaded.add(unbuilt) // self._serializer.pages_per_record
        self._records.counters.add(built_pages=built)

    def start_layer_wise_loading(self) -> int:
        """Nothing is left to load; the index stands for no batch."""
        self._admitted.clear()
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """True: a request is admitted only after its load."""
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget the loaded pages of a request that ends before its forward."""
        pages = self._admitted.pop(rid, None)
        if pages is not None:
            self._loaded.drop(pages)
        return pages is not None

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Write the exact pages among those of a node, later."""
        transfer = _kv(transfers)
        # New weights may have computed the pages, or the tokens that they follow.
        keys = [] if self._rests() or not self._ranks.writes else list(transfer.keys)
        pages = self._serializer.host_pages(transfer.device_indices)
        for writer in self._writers:
            writer.add(keys, pages if keys else pages[:0], self.record_offload_ready())
        return True

    def num_completed_offloads(self) -> int:
        """Offloads that have ended, not yet popped."""
        # SGLang keeps the pages until then.
        return min(writer.num_done() for writer in self._writers)

    def pop_completed_offload(self) -> bool:
        """Whether the oldest offload needs no other attempt."""
        # Representations that are absent are built.
        stored, *_ = [writer.pop() for writer in self._writers]
        if not self.num_completed_offloads():
            self._session.report_metrics()
        return stored

    def reset(self) -> None:
        """Let go of the KV pool, which is flushed; the store keeps its pages."""
        for writer in self._writers:
            writer.reset()
        for pages in self._admitted.values():
            self._loaded.drop(pages)
        self._admitted.clear()
        if self._swap is not None:
            self._swap.reset()
        self.layer_done_counter.reset()
        # While an update is open, weights may change without a call.
        session = self._session
        session.fingerprint = "" if session.update_is_open else model_fingerprint(session)
        session.storage_rests = True

    def close(self) -> None:
        """Write what waits, then close the store; each takes at most ``timeout_s``."""
        end = time.monotonic() + self._health.timeout_s
        for writer in self._writers:
            writer.drain(max(0.0, end - time.monotonic()))
            writer.close()
        self._loader.close()
        if self._representations is not None:
            self._representations.close()
        if self._swap is not None:
            self._swap.close()
        # Daemon threads: a store that does not close ends with the process.
        closing = Workers(1, "hisparse-close")
        self._health.call(closing, self._storage.close)
        closing.close()


def _kv(transfers: Sequence[Any]) -> Any:
    """The transfer of K and V: the only pool here."""
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)
