"""SGLang's external linker: the radix cache's way to a store below host memory.

SGLang's KV locations are host slots, so pages go from the host pool to the store and back, without
another copy in between.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from torch import Tensor

from hisparse.cache.page_format import PageFormat
from hisparse.config import StorageOptions
from hisparse.sglang.session import errors_logged, require_session
from hisparse.sglang.storage.health import StorageHealth
from hisparse.sglang.storage.key import make_namespace
from hisparse.sglang.storage.load import PageLoader
from hisparse.sglang.storage.offload import PageWriter
from hisparse.sglang.storage.page_storage import CHECKSUM_BYTES, PageStorage, Staging
from hisparse.sglang.storage.ranks import LinkerRanks
from hisparse.sglang.storage.setup import create_backend, read_options
from hisparse.sglang.storage.threads import Workers
from hisparse.sglang.storage.unread import UnreadKeys
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
        self._ranks = LinkerRanks.of(params, shared=session.spec.latent)
        coordinator = session.coordinator
        assert coordinator is not None, "SGLang builds the attention backend before the cache"
        self._exact, self._loaded = coordinator.share_pages()
        self._format = PageFormat(pool.host, params.page_size, coordinator.stored_entries())
        with errors_logged():
            self._connect(read_options(extra_config), pool.host.num_pages)
        #: Host pages of loads whose forward has not begun, by request.
        self._admitted: dict[str, Tensor] = {}

    def _connect(self, options: StorageOptions, num_pages: int) -> None:
        """Make the store, and the threads that read and write it."""
        record_bytes, checksums = self._format.record_bytes, options.backend != "file"
        row_bytes = record_bytes + (CHECKSUM_BYTES if checksums else 0)
        block_rows = max(1, _BLOCK_BYTES // row_bytes)
        # A block for each reader, and two for the writer.
        staging = Staging(options.threads + 2, block_rows, row_bytes)
        backend = create_backend(options, staging, self._ranks.rank, self._ranks.size)
        self._storage = PageStorage(backend, staging, checksums=checksums)
        assert self._session.storage is not None, "the session of a server with a linker counts"
        counters = self._session.storage
        self._health = health = StorageHealth(counters, options.timeout_s)
        common = (self._storage, self._format, staging, health, counters, UnreadKeys())
        self._loader = PageLoader(*common, options.threads)
        self._writer = PageWriter(*common, self._exact, int(num_pages * _MAX_WAITING))
        self._use_namespace()
        logger.info(
            "hisparse: storage: backend %s, pages of %d tokens and %s in %d parts, timeout_s %g, "
            "staging %s",
            options.backend,
            self._format.page_tokens,
            format_bytes(record_bytes),
            len(self._format.part_bytes),
            options.timeout_s,
            format_bytes(staging.data.nbytes),
        )

    def _use_namespace(self) -> None:
        """Address the pages of the weights that the model has now."""
        self._storage.use(make_namespace(self._session, self._format, self._ranks))

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Lengths of the prefixes that can be loaded, in pages of SGLang."""
        if self._session.weights_changed:
            return []
        return list(range(1, self._loader.find(list(_kv(transfers).keys)) + 1))

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Load pages into host slots; False: the request computes them.

        The call waits for the store: SGLang cannot take a request back that it has admitted.
        """
        if self._session.weights_changed:
            return False
        transfer = _kv(transfers)
        pages = self._format.host_pages(transfer.device_indices)
        ready = self.record_offload_ready()
        if not self._ranks.all_of(self._loader.load(list(transfer.keys), pages, ready)):
            return False
        self._exact.set_exact(pages)
        self._loaded.add(pages)
        self._admitted[rid] = pages
        return True

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
        writes = self._ranks.writes and not self._session.weights_changed
        keys = list(transfer.keys) if writes else []
        pages = self._format.host_pages(transfer.device_indices)
        self._writer.add(keys, pages if keys else pages[:0], self.record_offload_ready())
        return True

    def num_completed_offloads(self) -> int:
        """Offloads that have ended, not yet popped."""
        return self._writer.num_done()

    def pop_completed_offload(self) -> bool:
        """Whether the oldest offload needs no other attempt."""
        stored = self._writer.pop()
        if not self._writer.num_done():
            self._session.report_metrics()
        return stored

    def reset(self) -> None:
        """Let go of the KV pool, which is flushed; the store keeps its pages."""
        self._writer.reset()
        for pages in self._admitted.values():
            self._loaded.drop(pages)
        self._admitted.clear()
        self.layer_done_counter.reset()
        # An update of the weights ends with a flush, at once or later.
        self._use_namespace()
        self._session.weights_changed = False

    def close(self) -> None:
        """Write what waits, then close the store; each takes at most ``timeout_s``."""
        self._writer.drain(self._health.timeout_s)
        self._writer.close()
        self._loader.close()
        # Daemon threads: a store that does not close ends with the process.
        closing = Workers(1, "hisparse-close")
        self._health.call(closing, self._storage.close)
        closing.close()


def _kv(transfers: Sequence[Any]) -> Any:
    """The transfer of K and V: the only pool here."""
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)
