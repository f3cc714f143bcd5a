"""Attention by the CPU over pages where they lie, in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.adapters import Attended, TorchAdapter, add_sinks
from hisparse.algorithms import DecodeStep, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.kernels import DiffTables, paged_attention
from hisparse.types import AttentionRule, Pages


class HostAttention:
    """Attends what is not on the device, and whole contexts.

    Args:
        manager: has the pages.
        policy: shapes of the model and the rules of selections.
    """

    def __init__(self, manager: SparseKVCacheManager, policy: SelectionPolicy) -> None:
        self._manager, self._rule = manager, policy.attention_rule
        attend_with = manager.host.format.attend_with
        self._attend_rows = attend_with(_RowsOfHeads(policy.heads), policy.max_pages)
        self._attend_tokens = attend_with(_RowsOfHeads(1), policy.max_pages)

    def attend_away(
        self, layer_id: int, queries: Tensor, tables: DiffTables, rule: AttentionRule
    ) -> Attended | None:
        """Attend the pages that are away; None: no row may have any.

        ``queries [R, Q, D]``, model's dtype -> out ``[R, Q, Dv]``, lse ``[R, Q]``, float32; 0 and
        -inf for rows that wait.
        """
        if tables.away is None:
            return None
        host = self._manager.host
        # Missing pages are full: the tail page is on the device.
        lens = tables.away * host.kv.page_size
        return self._attend_rows(queries, host.stored(layer_id), tables.load_host_pages, lens, rule)

    def attend_contexts(
        self, layer_id: int, q: Tensor, step: DecodeStep, sinks: Tensor | None
    ) -> Tensor:
        """Attend ``q [B, Hq, D]`` over whole contexts -> ``[B, Hq, Dv] float32``.

        Requests run one by one: the order of summation depends on one request. ``sinks [Hq]``, any
        float dtype: see :meth:`SparseCoordinator.attention`.
        """
        manager, parts = self._manager, []
        size, stored = manager.host.kv.page_size, manager.host.stored(layer_id)
        lens = step.seq_lens.to(torch.int32)
        for request, length in enumerate(step.seq_lens_cpu.tolist()):
            one, count = slice(request, request + 1), -(-length // size)
            num_bytes = count * size * manager.host.format.layer_token_bytes
            manager.counters.add("streamed_decode_bytes", num_bytes)
            table = step.host_page_table[one, :count]
            part = self._attend_tokens(q[one], stored, table, lens[one], self._rule)
            parts.append(part.out if sinks is None else add_sinks(part, sinks))
        return torch.cat(parts)


class _RowsOfHeads(TorchAdapter):
    """Each row attends one head of pages that have all, or with ``heads`` 1 all of them."""

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def attend(
        self, q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        heads = self._heads
        return Attended(*paged_attention(q, kv, page_table, seq_lens, rule=rule, heads=heads))
