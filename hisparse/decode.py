"""Decode attention of one layer, in the three ways that a request can be served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.algorithms.page_score import all_pages
from hisparse.batch import DecodeStep, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.types import PagedKV, Selection

__all__ = ["AttendPart", "DecodeAttention"]

#: ``(layer_id, q [B, Hq, D], step) -> [B, Hq, Dv]``
AttendPart = Callable[[int, Tensor, DecodeStep], Tensor]


class DecodeAttention:
    """Select, swap in, attend.

    Args:
        policy: shapes of the model and what selections have to keep to.
        algorithm: selects.
        manager: brings the selected pages in.
        adapter: attends.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        algorithm: BaseSparseAlgorithm,
        manager: SparseKVCacheManager,
        adapter: BackendAdapter,
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._manager = manager
        self._adapter = adapter

    def attention(
        self, layer_id: int, q: Tensor, parts: Sequence[tuple[DecodeStep, AttendPart]]
    ) -> Tensor:
        """``q [B, Hq, D]`` -> ``[B, Hq, Dv]``; each part serves its requests in its way."""
        if len(parts) == 1:
            step, attend = parts[0]
            return attend(layer_id, q, step).to(q.dtype)
        out = q.new_empty(*q.shape[:-1], self._policy.kv.v_head_dim)
        for step, attend in parts:
            out[step.index] = attend(layer_id, q[step.index], step).to(q.dtype)
        return out

    def attend_sparse(self, layer_id: int, q: Tensor, step: DecodeStep) -> Tensor:
        """Over the pages that the algorithm selects; all of them while they fit the budget."""
        selection = self._algorithm.retrieve_topk(q, layer_id, step)
        return self._attend_selection(layer_id, q, step, selection)

    def attend_resident(self, layer_id: int, q: Tensor, step: DecodeStep) -> Tensor:
        """Dense, over a context that fits the row's device pages."""
        return self._attend_selection(layer_id, q, step, all_pages(step))

    def _attend_selection(
        self, layer_id: int, q: Tensor, step: DecodeStep, selection: Selection
    ) -> Tensor:
        table = self._manager.swap_in(layer_id, selection, step)
        self._manager.counters.count_tokens(step.num_tail_tokens)
        heads, size = self._policy.heads, self._policy.kv.page_size
        # All pages are full but the last one, the tail.
        seq_lens = torch.add(step.tail_row_lens, selection.lengths.flatten(), alpha=size)
        kv = self._manager.device.layer(layer_id)
        queries = q.unflatten(1, (heads, -1)).flatten(0, 1)
        attended = self._adapter.attend(queries, kv, table, seq_lens, self._policy.scale)
        out: Tensor = attended.out.unflatten(0, (-1, heads)).flatten(1, 2)
        return out

    def attend_staged(self, layer_id: int, q: Tensor, step: DecodeStep) -> Tensor:
        """Dense, over a context that does not fit: host pages in tiles, merged by log-sum-exp."""
        manager, size = self._manager, self._policy.kv.page_size
        out = q.new_empty(*q.shape[:-1], self._policy.kv.v_head_dim, dtype=torch.float32)
        seq_lens = step.num_pages * size + step.tail_lens
        manager.counters.count_tokens(int(step.seq_lens_cpu.sum()) * self._policy.heads)
        # One request after the other: tiles, and so the order of the sums, depend on it alone.
        for request in range(q.shape[0]):
            own = slice(request, request + 1)
            num_pages = -(-int(step.seq_lens_cpu[request]) // size)
            queries, table = q[own], step.host_page_table[own, :num_pages]
            out[own] = self._attend_tiles(layer_id, queries, table, seq_lens[own]).out
        return out

    def _attend_tiles(
        self, layer_id: int, q: Tensor, host_pages: Tensor, seq_lens: Tensor
    ) -> Attended:
        """``q [1, Hq, D]``, ``host_pages [1, P]``."""
        manager, size = self._manager, self._policy.kv.page_size
        total, width = host_pages.shape[1], manager.staging_pages
        attended: Attended | None = None
        for first in range(0, total, width):
            pages = host_pages[:, first : first + width]
            tile: PagedKV = manager.read_prefix(layer_id, pages.flatten())
            table = torch.arange(pages.numel(), dtype=torch.int32, device=q.device)
            lens = (seq_lens - first * size).clamp(0, pages.shape[1] * size)
            part = self._adapter.attend(q, tile, table.view(pages.shape), lens, self._policy.scale)
            attended = part if attended is None else merge_attended(attended, part)
            manager.counters.count_staged(
                pages.numel() * size * self._policy.kv.token_bytes_per_layer, decode=True
            )
        assert attended is not None, "a decode step has at least one page"
        return attended
