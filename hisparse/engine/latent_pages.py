"""Decode attention over device pages of latents in eight bits: decoded, then attended."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.algorithms import SelectionPolicy
from hisparse.cache import PageTable
from hisparse.cache.codec import decode_pages
from hisparse.memory.costs import decoded_row_pages
from hisparse.types import AttentionRule, StoredKV

__all__ = ["LatentPages"]


class LatentPages:
    """Decodes the pages of a table and attends over them, so that every adapter serves latents.

    A dense context is decoded and merged in parts as wide as a selection. The parts depend on the
    policy alone, so a request's sums do not depend on others.

    Args:
        policy: shapes of the model and the rules of selections.
        adapter: attends over latents in the model's dtype.
    """

    def __init__(self, policy: SelectionPolicy, adapter: BackendAdapter) -> None:
        self._kv = policy.kv
        self._adapter = adapter
        self._width = decoded_row_pages(policy)

    def attend(
        self, queries: Tensor, stored: StoredKV, table: PageTable, rule: AttentionRule
    ) -> Attended:
        """Attend ``queries [R, Q, D]`` over the device pages of each row.

        Args:
            queries: one token per row.
            stored: ``[N, 1, S, bytes]``.
            table: ``[R, P]``.
            rule: scale, cap and window. The table of a layer with a window is decoded at once.
        """
        size, attended, count = self._kv.page_size, None, table.pages.shape[1]
        width = count if rule.window else self._width
        for first in range(0, count, width):
            pages = table.pages[:, first : first + width]
            kv = decode_pages(self._kv, stored, pages.flatten())
            own = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device)
            lens = (table.seq_lens - first * size).clamp(0, pages.shape[1] * size)
            part = self._adapter.attend(queries, kv, own.view(pages.shape), lens, rule)
            attended = part if attended is None else merge_attended(attended, part)
        assert attended is not None, "a table has the tail page at least"
        return attended
