"""SGLang's external linker: the radix cache's way to a store below host memory.

SGLang's KV locations are host slots, so pages move directly between the host pool and the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.srt.mem_cache.utils import get_storage_hash_str
from torch import Tensor

from hisparse.cache.serializer import PageSerializer
from hisparse.options import StorageOptions
from hisparse.sglang.features.storage.calls import StorageHealth, Workers
from hisparse.sglang.features.storage.key import StorageState, make_namespace, model_fingerprint
from hisparse.sglang.features.storage.pages import open_storage
from hisparse.sglang.features.storage.records import RecordStore
from hisparse.sglang.features.storage.representations import (
    representation_namespace,
    representation_records,
)
from hisparse.sglang.features.storage.swap import make_swap
from hisparse.sglang.features.storage.writer import PageWriter
from hisparse.sglang.ranks import LinkerRanks
from hisparse.sglang.session import errors_logged, require_session
from hisparse.units import format_bytes

logger = logging.getLogger("hisparse")

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

    Attributes:
        serializer: moves host pages to records and back.
        ranks: the ranks of the server.
        exact: says which host pages may be shared.
        records: of pages that servers share.
        swap: pages of retracted requests; None: these are computed again.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: pool}
        self._session = session = require_session()
        state = session.get(StorageState)
        assert state is not None, "the session of a server with a linker has it"
        self._state = state
        self.layer_done_counter = LayerWiseLoadCounter(session.setup.spec.num_layers)
        self.ranks = LinkerRanks.of(params, pool.host.format)
        coordinator = session.coordinator
        self.exact, self._loaded = coordinator.share_pages()
        self.serializer = PageSerializer(pool.host, params.page_size, coordinator.stored_entries())
        with errors_logged():
            self._connect(StorageOptions(**extra_config), pool.host.num_pages)
        #: Host pages of loads whose forward has not begun, by request.
        self._admitted: dict[str, Tensor] = {}

    def _connect(self, options: StorageOptions, num_pages: int) -> None:
        """Open the store, and make the threads that read and write it."""
        session, state, serializer, ranks = self._session, self._state, self.serializer, self.ranks
        storage = open_storage(options, serializer.record_bytes, ranks.rank, ranks.size)
        self._health = health = StorageHealth(state.counters, options.timeout_s)
        self.records = records = RecordStore(
            storage=storage,
            serializer=serializer,
            health=health,
            counters=state.counters,
            threads=options.threads,
        )
        max_waiting = int(num_pages * _MAX_WAITING)
        self._writers = [PageWriter(records, self.exact, max_waiting)]
        self._representations: RecordStore | None = None
        state.fingerprint = model_fingerprint(state)
        self._use_namespace()
        assert records.namespace is not None, "it was set"
        logger.info(
            "hisparse: storage: %s, model %s, pages of %d tokens and %s, timeout_s %g, staging %s",
            f"manager {options.manager}" if options.manager else f"backend {options.backend}",
            records.namespace.model,
            serializer.page_tokens,
            format_bytes(serializer.record_bytes),
            options.timeout_s,
            format_bytes(storage.buffer.data.nbytes),
        )
        self._representations = representation_records(session, options, records)
        if (stored := self._representations) is not None:
            self._writers.append(PageWriter(stored, self.exact, max_waiting))
        self.swap = make_swap(records, self.exact, options)
        self._swap_min_tokens = max(1, options.swap_min_tokens or 0)
        if self.swap is not None:
            state.swap_out = self._swap_out

    def _use_namespace(self) -> None:
        """Address the pages of the weights that the model has now."""
        namespace = make_namespace(
            self._session, self._state.fingerprint, self.serializer, self.ranks
        )
        self.records.namespace = namespace
        if (stored := self._representations) is not None:
            size = stored.serializer.record_bytes
            stored.namespace = representation_namespace(namespace, self._session, size)
        self._state.rests = False

    def rests(self) -> bool:
        """Whether the ranks do not use the store.

        An update can fail on one rank and flush only the others. So all ranks start to use the
        store together, at the first request after the flush.
        """
        state = self._state
        if state.rests and self.ranks.all_of(state.fingerprint != ""):
            self._use_namespace()
            logger.info("hisparse: storage: in use again, for the weights of the last flush")
        return state.rests

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Length of the longest prefix that every rank can load, in pages of SGLang; [] for none.

        Every shorter one can be loaded too. SGLang would take milliseconds to sort them all.
        """
        if self.rests():
            return []
        found = self.ranks.least_of(self._find(rid, list(_kv(transfers).keys)))
        return [found] if found else []

    def _find(self, rid: str, names: list[str]) -> int:
        """Length of the longest prefix of the pages ``names`` that this rank can load."""
        first = self._first_swapped(rid, names)
        found = self.records.find(names[:first])
        if found == first and self.swap is not None:
            found += self.swap.find(rid, names[first:])
        return found

    def _first_swapped(self, rid: str, names: Sequence[str]) -> int:
        """Index of the first page that the request has swapped out; their number if none."""
        return len(names) if self.swap is None else self.swap.first(rid, names)

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Load pages into host slots; False: the request computes them.

        The call waits for the store: SGLang cannot take a request back that it has admitted.
        """
        if self.rests():
            return False
        transfer = _kv(transfers)
        pages = self.serializer.host_pages(transfer.device_indices)
        ready = self.record_offload_ready()
        names = list(transfer.keys)
        first = self._first_swapped(rid, names)
        if not self.ranks.all_of(self._load(rid, names, first, pages, ready)):
            return False
        self._add_loaded(names[:first], pages, ready)
        self._admitted[rid] = pages
        return True

    def _load(
        self, rid: str, names: list[str], first: int, pages: Tensor, ready: Sequence[Any]
    ) -> bool:
        """Load host ``pages [P] int64``: ``first`` records that all servers share, then its own."""
        end = first * self.serializer.pages_per_record
        if first:
            if not self.records.load(names[:first], pages[:end], ready):
                return False
            self.exact.set_exact(pages[:end])
        if self.swap is None or first == len(names):
            return True
        return self.swap.load(rid, names[first:], pages[end:], ready)

    def _add_loaded(self, names: list[str], pages: Tensor, ready: Sequence[Any]) -> None:
        """Load the representations ``names`` of ``pages [P] int64``; the others are built."""
        unbuilt = pages
        if names and self._representations is not None:
            end = len(names) * self.serializer.pages_per_record
            unbuilt = self._representations.load_found(names, pages[:end], ready)
            unbuilt = torch.cat([unbuilt, pages[end:]])
        built = self._loaded.add(unbuilt) // self.serializer.pages_per_record
        self.records.counters.add(built_pages=built)

    def _swap_out(self, request: Any) -> None:
        """Write the pages of SGLang's ``Req`` that the radix cache does not hold.

        Args:
            request: still has its host slots.
        """
        assert self.swap is not None, "only a linker with a swap is asked"
        # A forward of it failed, or its K and V do not follow from its tokens: it starts over.
        starts_over = request.skip_radix_cache_insert or request.input_embeds is not None
        if self.rests() or starts_over:
            return
        kv, size = request.kv, self.serializer.page_tokens
        tokens = request.origin_input_ids + request.output_ids
        # The last token's K and V may be in the works, and its query is needed anyway.
        first = kv.cache_protected_len // size
        end = min(kv.kv_committed_len, len(tokens) - 1) // size
        if (end - first) * size < self._swap_min_tokens:
            return
        table = self._session.req_to_token_pool.req_to_token
        pages = self.serializer.host_pages(table[kv.req_pool_idx, first * size : end * size])
        hashes, ready = _hashes(request, tokens, size), self.record_offload_ready()
        kept = self.swap.swap_out(request, hashes[first:end], pages, ready)
        # Until all ranks have read them, none goes on and writes to the pages of a common pool.
        if not self.ranks.all_of(kept):
            self.swap.drop(request.rid)

    def start_layer_wise_loading(self) -> int:
        """Nothing is left to load; -1 is the index of no batch."""
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
        keys = [] if self.rests() or not self.ranks.writes else list(transfer.keys)
        pages = self.serializer.host_pages(transfer.device_indices)
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
            self._session.backend.metrics.report(now=True)
        return stored

    def reset(self) -> None:
        """Stop reading and writing the KV pool, which is flushed; the store keeps its pages."""
        for writer in self._writers:
            writer.reset()
        for pages in self._admitted.values():
            self._loaded.drop(pages)
        self._admitted.clear()
        if self.swap is not None:
            self.swap.reset()
        self.layer_done_counter.reset()
        # While an update is open, weights may change without a call.
        state = self._state
        state.fingerprint = "" if state.update_is_open else model_fingerprint(state)
        state.rests = True

    def close(self) -> None:
        """Write what waits, then close the store; each takes at most ``timeout_s``."""
        end = time.monotonic() + self._health.timeout_s
        for writer in self._writers:
            writer.drain(max(0.0, end - time.monotonic()))
            writer.close()
        self.records.close()
        if self._representations is not None:
            self._representations.close()
        if self.swap is not None:
            self.swap.close()
        # Daemon threads: a store that does not close ends with the process.
        closing = Workers(1, "hisparse-close")
        self._health.call(closing, self.records.storage.close)
        closing.close()


def _kv(transfers: Sequence[Any]) -> Any:
    """The transfer of K and V, the only pool of this linker."""
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _hashes(request: Any, tokens: Any, page_tokens: int) -> list[str]:
    """SGLang's hash of each whole page: of its tokens and all earlier ones."""
    whole = tokens[: len(tokens) // page_tokens * page_tokens]
    key = RadixKey(whole, request.extra_key, cache_salt=request.cache_salt)
    return list(get_storage_hash_str(key, page_size=page_tokens))
