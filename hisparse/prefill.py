"""Prefill of one layer: write through, attend exactly, leave a warm working set behind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.algorithms import BaseSparseAlgorithm, PageRun
from hisparse.batch import PrefillBatch, PrefillChunk, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.types import PagedKV

__all__ = ["Prefill"]


class Prefill:
    """Runs prefill chunks; prefill attention is always dense and exact.

    Args:
        policy: shapes of the model.
        algorithm: gets to see the keys and queries of the chunks.
        manager: where K/V go and prefixes come from.
        adapter: attends.
        representations: name to ``[L, host pages, ...]``.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        algorithm: BaseSparseAlgorithm,
        manager: SparseKVCacheManager,
        adapter: BackendAdapter,
        representations: Mapping[str, Tensor],
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._manager = manager
        self._adapter = adapter
        self._representations = dict(representations)

    def attention(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, batch: PrefillBatch
    ) -> Tensor:
        """``q [T, Hq, D]``, ``k, v [T, Hkv, D]`` -> ``[T, Hq, Dv]`` in the dtype of q."""
        self._manager.write(layer_id, batch.host_slots, k, v)
        outputs = []
        for chunk in batch.chunks:
            own = slice(chunk.offset, chunk.offset + chunk.length)
            pages = self._aligned(layer_id, chunk, k[own], v[own])
            self._summarize(layer_id, chunk, q[own], pages)
            outputs.append(self._attend(layer_id, chunk, q[own], k[own], v[own]).to(q.dtype))
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

    def _summarize(self, layer_id: int, chunk: PrefillChunk, q: Tensor, own: PagedKV) -> None:
        size = self._policy.kv.page_size
        first, last = chunk.start // size, chunk.end // size
        if first == last:
            return
        keys = own.k[: (last - first) * size].unflatten(0, (-1, size))
        run = PageRun(self._policy, self._representations, chunk.host_pages[first:last])
        self._algorithm.construct_representations(keys, q, layer_id, run)

    def _attend(
        self, layer_id: int, chunk: PrefillChunk, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """The chunk over itself and over its prefix, which streams through staging."""
        manager, scale, size = self._manager, self._policy.scale, self._policy.kv.page_size
        attended = self._adapter.attend_prefill(q, k, v, scale, causal=True)
        tile_tokens = manager.staging_pages * size
        for start in range(0, chunk.start, tile_tokens):
            stop = min(start + tile_tokens, chunk.start)
            pages = chunk.host_pages_cpu[start // size : -(-stop // size)]
            tile = manager.read_prefix(layer_id, pages)
            keys, values = (x.transpose(1, 2).flatten(0, 1)[: stop - start] for x in tile)
            part = self._adapter.attend_prefill(q, keys, values, scale, causal=False)
            attended = merge_attended(Attended(*part), attended)
            manager.counters.count_staged(
                (stop - start) * self._policy.kv.token_bytes_per_layer, decode=False
            )
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
