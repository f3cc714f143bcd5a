"""Decode attention of one layer: select, swap in, attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hisparse.adapters import Attended
from hisparse.algorithms import DecodeStep
from hisparse.cache import PageTable
from hisparse.engine.parts import EngineParts
from hisparse.engine.staged import StagedAttention
from hisparse.engine.step import DecodePart
from hisparse.types import Selection

__all__ = ["DecodeAttention", "SelectionObserver"]

#: ``(layer_id, queries [B, Hq, D], step, selection)``, called after every selection.
SelectionObserver = Callable[[int, Tensor, DecodeStep, Selection], None]


class DecodeAttention:
    """Attends the new token of each request, in the request's mode.

    Args:
        parts: what selects, brings pages in and attends.

    Attributes:
        observer: called after every selection; None: nobody observes.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._staged = StagedAttention(parts)
        self.observer: SelectionObserver | None = None

    def attention(self, layer_id: int, q: Tensor, parts: Sequence[DecodePart]) -> Tensor:
        """``q [B, Hq, D]`` -> ``[B, Hq, Dv]`` in the dtype of q, each part in its mode."""
        if len(parts) == 1:
            return self._attend(layer_id, q, parts[0]).to(q.dtype)
        out = q.new_empty(*q.shape[:-1], self._parts.policy.kv.v_head_dim)
        for part in parts:
            out[part.index] = self._attend(layer_id, q[part.index], part).to(q.dtype)
        return out

    def _attend(self, layer_id: int, q: Tensor, part: DecodePart) -> Tensor:
        if part.mode == "staged":
            return self._staged.attend(layer_id, q, part)
        if part.mode == "resident":
            return self._attend_resident(layer_id, q, part)
        return self._attend_sparse(layer_id, q, part)

    def _attend_sparse(self, layer_id: int, q: Tensor, part: DecodePart) -> Tensor:
        """Over the selected pages; extensions refine the selection and the result."""
        modes, followers = self._parts.modes, []
        if modes.selects(layer_id):
            part.selection = self._select(layer_id, q, part)
            followers = modes.followers(layer_id)
        selection = part.selection
        assert selection is not None, "the first layer of a group selects"
        table = self._parts.manager.swap_in(
            layer_id, selection, part.rows, self._tail_lens(selection, part), followers
        )
        queries = self._by_row(q)
        attended = self._attend_pages(layer_id, queries, table)
        for extension in self._parts.extensions:
            attended = extension.after_attention(layer_id, queries, selection, part, attended)
        return self._by_request(attended.out)

    def _attend_resident(self, layer_id: int, q: Tensor, part: DecodePart) -> Tensor:
        """Dense, over a context that fits the row's device pages."""
        manager = self._parts.manager
        # No row has more device pages, so no context that fits has.
        width = min(part.view.max_pages, manager.device.max_row_pages)
        table = manager.swap_in(layer_id, _all_pages(part.view, width), part.rows)
        return self._by_request(self._attend_pages(layer_id, self._by_row(q), table).out)

    def _select(self, layer_id: int, q: Tensor, part: DecodePart) -> Selection:
        """``q [B, Hq, D]`` -> the selection of each request, all pages for dense ones."""
        selection = self._parts.algorithm.retrieve_topk(q, layer_id, part.view)
        self._count_capped(selection, part)
        for extension in self._parts.extensions:
            selection = extension.refine_selection(layer_id, q, selection, part)
        if self.observer is not None:
            self.observer(layer_id, q, part.view, selection)
        if part.dense is None:
            return selection
        return _all_where(part.dense, selection, part.view, self._parts.modes.dense_width)

    def _count_capped(self, selection: Selection, part: DecodePart) -> None:
        """Count selections of a varying length that would have been longer."""
        if not self._parts.algorithm.variable_lengths:
            return
        most = self._parts.policy.max_pages
        capped = (selection.lengths == most) & (part.view.num_pages[:, None] > most)
        if part.dense is not None:
            capped = capped & ~part.dense[:, None]
        self._parts.manager.counters.count("capped_selections", capped)

    def _tail_lens(self, selection: Selection, part: DecodePart) -> Tensor:
        """``[R] int32``, tokens of the tail page that are attended."""
        tail_lens = part.rows.tail_lens
        if not self._parts.algorithm.ranks_tail:
            return tail_lens
        # A selection that fills the budget leaves no room for the tail page.
        has_room = selection.lengths < self._parts.policy.max_pages
        has_room = has_room if part.dense is None else has_room | part.dense[:, None]
        return tail_lens * has_room.flatten()

    def _attend_pages(self, layer_id: int, queries: Tensor, table: PageTable) -> Attended:
        """``queries [R, Q, D]`` over the device pages of each row."""
        kv = self._parts.manager.device.stored(layer_id)
        adapter, scale = self._parts.adapter, self._parts.policy.scale
        if kv.scales is not None:
            return adapter.attend_fp8(queries, kv, *table, scale)
        return adapter.attend(queries, kv.kv, *table, scale)

    def _by_row(self, q: Tensor) -> Tensor:
        """``[B, Hq, D]`` -> ``[R, Hq / H, D]``."""
        rows: Tensor = q.unflatten(1, (self._parts.policy.heads, -1)).flatten(0, 1)
        return rows

    def _by_request(self, out: Tensor) -> Tensor:
        """``[R, Hq / H, Dv]`` -> ``[B, Hq, Dv]``."""
        requests: Tensor = out.unflatten(0, (-1, self._parts.policy.heads)).flatten(1, 2)
        return requests


def _all_pages(step: DecodeStep, width: int) -> Selection:
    """The selection of every full page, ``width`` entries wide."""
    pages = torch.arange(max(width, 1), dtype=torch.int32, device=step.num_pages.device)
    pages = torch.where(pages < step.num_pages[:, None], pages, -1)
    heads = step.policy.heads
    return Selection(
        pages[:, None].expand(-1, heads, -1), step.num_pages[:, None].expand(-1, heads)
    )


def _all_where(dense: Tensor, selection: Selection, step: DecodeStep, width: int) -> Selection:
    """All pages of the requests ``dense [B] bool``, ``selection`` for the others."""
    everything = _all_pages(step, width)
    pages = torch.nn.functional.pad(
        selection.pages, (0, width - selection.pages.shape[-1]), value=-1
    )
    return Selection(
        torch.where(dense[:, None, None], everything.pages, pages),
        torch.where(dense[:, None], everything.lengths, selection.lengths),
    )
