"""Requests whose prompt another server computed: their K and V arrived in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hisparse.cache import SparseKVCacheManager
from hisparse.engine.loaded import Build, LoadedPages
from hisparse.engine.step import DecodeBatch, PrefillChunk

__all__ = ["ArrivedRequests"]


class ArrivedRequests:
    """Makes requests ready to decode that this engine has not prefilled.

    Their first decode step builds the representations of their pages from K and V, and fills their
    tail pages, each layer's before it attends. Device pages stay empty until steps select them.

    Args:
        manager: reads K and V.
        build: builds representations; None: the pages come with all that they need.
    """

    def __init__(self, manager: SparseKVCacheManager, build: Build | None) -> None:
        self._manager = manager
        self._build = build
        self._size = size = manager.host.kv.page_size
        self._pages = LoadedPages(manager, build, manager.host.num_pages, size)
        self._waiting: set[int] = set()
        #: Requests that start in this step: an empty chunk after their tokens.
        self._starting: list[PrefillChunk] = []

    def add(self, slot: int, pages: Tensor) -> None:
        """Note a request that begins in ``slot``.

        Args:
            slot: request slot.
            pages: ``[P] int64`` on the host, the full host pages that arrived for it.
        """
        # The pages are noted for themselves: a request that ends early may leave them to others,
        # as a shared prefix.
        self._pages.add(pages)
        self._waiting.add(slot)

    def drop(self, slot: int) -> None:
        """Forget a request that ends."""
        self._waiting.discard(slot)

    def any_of(self, slots: Iterable[int]) -> bool:
        """Whether one of the request slots has not decoded yet."""
        return not self._waiting.isdisjoint(slots)

    def begin(self, batch: DecodeBatch) -> None:
        """Find the requests that start in this step."""
        self._starting = []
        if not self._waiting:
            return
        for row, slot in enumerate(batch.slots_cpu.tolist()):
            if slot in self._waiting:
                self._waiting.discard(slot)
                tokens = int(batch.seq_lens_cpu[row]) - 1
                pages = batch.host_page_table[row, : -(-tokens // self._size)]
                chunk = PrefillChunk(
                    slot=slot, start=tokens, length=0, offset=0, host_pages=pages, is_last=True
                )
                self._starting.append(chunk)
                self._manager.residency.keep_pages(slot, pages)
        if self._starting:
            self._pages.begin(self._starting)

    def prepare(self, layer_id: int) -> None:
        """Make one layer ready for the requests that start in this step."""
        if not self._starting:
            return
        if not self._manager.host.kv.window(layer_id):
            self._pages.prepare(layer_id)
        for chunk in self._starting:
            tail = chunk.end % self._size
            first = int(chunk.host_pages_cpu[-1]) * self._size
            # Of a full last page, one token is read, for its shape.
            slots = first + torch.arange(max(tail, 1))
            k, v = self._manager.kv_io.read_tokens(layer_id, slots)
            if self._build is not None:
                # Algorithms learn that the prompt has ended.
                self._build(layer_id, chunk, k[:0], v[:0])
            if tail:
                self._manager.kv_io.write_tail(layer_id, chunk.slot, k, v)
