"""Prefill of one layer: write through, attend exactly, leave a warm working set behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.batch import PrefillBatch, PrefillChunk, PrefillStep, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.request_indexes import RequestIndexes
from hisparse.tail_estimate import TailEstimate
from hisparse.types import IndexerInputs, PagedKV

__all__ = ["Prefill"]


class Prefill:
    """Runs prefill chunks, exactly: dense, but where the model itself was trained sparse.

    Args:
        policy: shapes of the model.
        algorithm: gets to see the keys and queries of the chunks.
        manager: where K/V go and prefixes come from.
        adapter: attends.
        representations: by name.
        indexes: what algorithms keep of a request in host memory.
        tail: what estimates the pages that are not selected, if anything does.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        algorithm: BaseSparseAlgorithm,
        manager: SparseKVCacheManager,
        adapter: BackendAdapter,
        representations: Mapping[str, Tensor],
        indexes: RequestIndexes,
        tail: TailEstimate | None,
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._manager = manager
        self._adapter = adapter
        self._representations = dict(representations)
        self._indexes = indexes
        self._tail = tail

    def attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: PrefillBatch,
        indexer: IndexerInputs | None,
    ) -> Tensor:
        """``q [T, Hq, D]``, ``k, v [T, Hkv, D]`` -> ``[T, Hq, Dv]`` in the dtype of q."""
        self._manager.write(layer_id, batch.host_slots, k, v)
        outputs = []
        for chunk in batch.chunks:
            own = slice(chunk.offset, chunk.offset + chunk.length)
            pages = self._aligned(layer_id, chunk, k[own], v[own])
            indexed = None if indexer is None else indexer.take(own)
            step = self.summarize(layer_id, chunk, q[own], pages, indexed)
            chosen = self._algorithm.select_prefill(layer_id, step)
            out = self._attend(layer_id, chunk, q[own], k[own], v[own], chosen)
            outputs.append(out.to(q.dtype))
            self._place(layer_id, chunk, pages)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _aligned(self, layer_id: int, chunk: PrefillChunk, k: Tensor, v: Tensor) -> PagedKV:
        """The chunk's ``[T', Hkv, D]`` from the start of its first page on.

        A chunk that begins within a page gets the page's earlier tokens back from host memory.
        """
        size = self._policy.kv.page_size
        missing = chunk.start % size
        if not missing:
            return PagedKV(k, v)
        page = chunk.host_pages[chunk.start // size].long()
        slots = page * size + torch.arange(missing, device=page.device)
        head_k, head_v = self._manager.read_tokens(layer_id, slots)
        return PagedKV(torch.cat([head_k, k]), torch.cat([head_v, v]))

    def summarize(
        self,
        layer_id: int,
        chunk: PrefillChunk,
        q: Tensor,
        own: PagedKV,
        indexer: IndexerInputs | None = None,
    ) -> PrefillStep:
        """Let the algorithm remember a chunk.

        Args:
            layer_id: layer number.
            chunk: the chunk.
            q: ``[T, Hq, D]``; none of a chunk that is not computed but loaded.
            own: ``[T', Hkv, D]``, from the start of the chunk's first page on.
            indexer: of the chunk's tokens.

        Returns:
            the chunk as algorithms see it.
        """
        size = self._policy.kv.page_size
        first, last = chunk.start // size, chunk.end // size
        keys, values = (x[: (last - first) * size].unflatten(0, (-1, size)) for x in own)
        step = PrefillStep(
            policy=self._policy,
            representations=self._representations,
            slot=chunk.slot,
            start=chunk.start,
            length=chunk.length,
            first_page=first,
            host_pages=chunk.host_pages[first:last],
            context_pages=chunk.host_pages,
            is_last=chunk.is_last,
            indexer=indexer,
            read_context=lambda layer: self._read(layer, chunk, chunk.end),
            indexes=self._indexes,
        )
        self._algorithm.construct_representations(keys, q, layer_id, step)
        if self._tail is not None:
            self._tail.store(self._representations, layer_id, keys, values, step.host_pages)
        return step

    def _read(
        self, layer_id: int, chunk: PrefillChunk, end: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Positions below ``end``, tile by tile: the first position, K and V ``[t, Hkv, D]``."""
        manager, size = self._manager, self._policy.kv.page_size
        tile_tokens = manager.staging_pages * size
        for start in range(0, end, tile_tokens):
            stop = min(start + tile_tokens, end)
            pages = chunk.host_pages_cpu[start // size : -(-stop // size)]
            tile = manager.read_prefix(layer_id, pages)
            keys, values = (x.transpose(1, 2).flatten(0, 1)[: stop - start] for x in tile)
            manager.counters.count_staged(
                (stop - start) * self._policy.kv.token_bytes_per_layer, decode=False
            )
            yield start, keys, values

    def _attend(
        self,
        layer_id: int,
        chunk: PrefillChunk,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chosen: Tensor | None,
    ) -> Tensor:
        """The chunk over itself and over its prefix, which streams through staging.

        Args:
            layer_id: layer number.
            chunk: the chunk.
            q: ``[T, Hq, D]``.
            k, v: ``[T, Hkv, D]``.
            chosen: positions ``[T, K] int32`` that each query attends; None: all up to its own.
        """
        scale, adapter = self._policy.scale, self._adapter
        if chosen is None:
            attended = adapter.attend_prefill(q, k, v, scale, causal=True)
        else:
            attended = adapter.attend_chosen(q, k, v, scale, chosen - chunk.start)
        for first, keys, values in self._read(layer_id, chunk, chunk.start):
            if chosen is None:
                part = adapter.attend_prefill(q, keys, values, scale, causal=False)
            else:
                part = adapter.attend_chosen(q, keys, values, scale, chosen - first)
            attended = merge_attended(Attended(*part), attended)
        return attended.out

    def _place(self, layer_id: int, chunk: PrefillChunk, own: PagedKV) -> None:
        """Leave the most recent full pages, and the tail, on the device."""
        manager, size = self._manager, self._policy.kv.page_size
        first, last = chunk.start // size, chunk.end // size
        oldest = max(0, last - int(manager.capacities(np.array(chunk.slot))))
        if oldest < first and manager.is_cold(chunk.slot):
            host = manager.host.layer(layer_id)
            manager.place(layer_id, chunk.slot, oldest, first, host, chunk.host_pages)
            manager.counters.count_placed((first - oldest) * self._policy.heads)
        begin = max(oldest, first)
        if begin < last:
            k, v = (
                x[: (last - first) * size].unflatten(0, (-1, size)).transpose(1, 2) for x in own
            )
            table = torch.arange(-first, last - first, dtype=torch.int32, device=k.device)
            manager.place(layer_id, chunk.slot, begin, last, PagedKV(k, v), table)
        tail = chunk.end % size
        if tail:
            manager.write_tail(layer_id, chunk.slot, own.k[-tail:], own.v[-tail:])
