"""Builds what pages lack whose K and V this engine received: from a store, or another server."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from hisparse.cache import SparseKVCacheManager
from hisparse.engine.prefill import PrefillChunk

#: ``(layer_id, chunk, k, v)``, K and V ``[T, Hkv, D]``: builds the representations of a chunk.
Build = Callable[[int, PrefillChunk, Tensor, Tensor], None]


class RestoredPages:
    """Host pages that have K and V from a store, but no representations yet.

    The prefill that follows builds them from K and V, each layer's before it attends.

    Args:
        builds: for each layer that has representations, builds those of a chunk, which has no
            queries; empty if pages come with their representations.
    """

    def __init__(self, manager: SparseKVCacheManager, builds: Mapping[int, Build]) -> None:
        self._manager = manager
        self._builds = builds
        self._size = manager.host.kv.page_size
        self._pending = np.zeros(manager.host.num_pages, dtype=np.bool_)
        self._has_pending = False
        self._chunks: list[PrefillChunk] = []

    def add(self, pages: Tensor) -> int:
        """Note that ``pages [P] int64`` were restored; returns how many of them are built."""
        if not self._builds or not len(pages):
            return 0
        self._pending[pages.numpy()] = True
        self._has_pending = True
        return len(pages)

    def drop(self, pages: Tensor) -> None:
        """Forget ``pages [P] int64``, whose request will not run."""
        self._pending[pages.numpy()] = False

    def begin(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Find the restored pages before a prefill's chunks, and return whether there are any."""
        self._chunks = []
        if not self._has_pending:
            return False
        for chunk in chunks:
            pages = chunk.host_pages_cpu[: chunk.start // self._size].numpy()
            indices = np.flatnonzero(self._pending[pages])
            # Another chunk of this forward may have the same prefix.
            self._pending[pages] = False
            self._chunks += self._runs(chunk, indices)
        self._has_pending = bool(self._pending.any())
        return bool(self._chunks)

    def _runs(self, chunk: PrefillChunk, indices: np.ndarray) -> list[PrefillChunk]:
        """Consecutive pages as chunks, each at most a staging tile.

        Args:
            chunk: the chunk with these pages before it.
            indices: ``[n]``, ascending indices of pages in the sequence.
        """
        width, runs = self._manager.staging.num_pages, []
        for _, group in groupby(enumerate(indices.tolist()), lambda pair: pair[1] - pair[0]):
            run = [index for _, index in group]
            for first in range(0, len(run), width):
                part = run[first : first + width]
                runs.append(
                    PrefillChunk(
                        slot=chunk.slot,
                        start=part[0] * self._size,
                        length=len(part) * self._size,
                        offset=0,
                        host_pages=chunk.host_pages[: part[-1] + 1],
                        is_last=False,
                    )
                )
        return runs

    def prepare(self, layer_id: int) -> None:
        """Build the representations of this forward's restored pages in one layer."""
        if (build := self._builds.get(layer_id)) is None:
            return
        for chunk in self._chunks:
            pages = chunk.host_pages_cpu[chunk.start // self._size :].long()
            slots = (pages[:, None] * self._size + torch.arange(self._size)).flatten()
            build(layer_id, chunk, *self._manager.kv_io.read_tokens(layer_id, slots))


class TransferredRequests:
    """Makes requests ready to decode that this engine has not prefilled.

    Their first decode step builds the representations of their pages from K and V, and fills their
    tail pages, each layer's before it attends. Device pages stay empty until steps select them.

    Args:
        builds: see :class:`RestoredPages`.
    """

    def __init__(self, manager: SparseKVCacheManager, builds: Mapping[int, Build]) -> None:
        self._manager = manager
        self._builds = builds
        self._size = manager.host.kv.page_size
        self._pages = RestoredPages(manager, builds)
        self._waiting: set[int] = set()
        #: Requests that start in this step: an empty chunk after their tokens.
        self._starting: list[PrefillChunk] = []

    def add(self, slot: int, pages: Tensor) -> None:
        """Note a request that begins in ``slot``.

        Args:
            pages: ``[P] int64`` on the host, the full host pages that arrived for it.
        """
        # Noted apart from the request: if it ends early, others may use its pages as a prefix.
        self._pages.add(pages)
        self._waiting.add(slot)

    def drop(self, slot: int) -> None:
        """Forget a request that ends."""
        self._waiting.discard(slot)

    def any_of(self, slots: Iterable[int]) -> bool:
        """Whether one of the request slots has not decoded yet."""
        return not self._waiting.isdisjoint(slots)

    def begin(self, slots: np.ndarray, seq_lens: np.ndarray, host_page_table: Tensor) -> bool:
        """Find the requests that start in a decode step, and return whether there are any.

        Args:
            slots: ``[B] int64``, request slots.
            seq_lens: ``[B] int64``, tokens of each request, the new one included.
            host_page_table: ``[B, P] int32``.
        """
        self._starting = []
        if not self._waiting:
            return False
        for row, slot in enumerate(slots.tolist()):
            if slot in self._waiting:
                self._waiting.discard(slot)
                tokens = int(seq_lens[row]) - 1
                pages = host_page_table[row, : -(-tokens // self._size)]
                chunk = PrefillChunk(
                    slot=slot, start=tokens, length=0, offset=0, host_pages=pages, is_last=True
                )
                self._starting.append(chunk)
                self._manager.residency.keep_pages(slot, pages)
        self._pages.begin(self._starting)
        return bool(self._starting)

    def prepare(self, layer_id: int) -> None:
        """Make one layer ready for the requests that start in this step."""
        self._pages.prepare(layer_id)
        for chunk in self._starting:
            tail = chunk.end % self._size
            first = int(chunk.host_pages_cpu[-1]) * self._size
            # Of a full last page, one token is read, for its shape.
            slots = first + torch.arange(max(tail, 1))
            k, v = self._manager.kv_io.read_tokens(layer_id, slots)
            if build := self._builds.get(layer_id):
                # Algorithms learn that the prompt has ended.
                build(layer_id, chunk, k[:0], v[:0])
            if tail:
                self._manager.kv_io.write_tail(layer_id, chunk.slot, k, v)
