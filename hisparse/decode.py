"""Decode attention of one layer, in the three ways that a request can be served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.batch import DecodeStep, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.tail_estimate import TailEstimate
from hisparse.types import IndexerInputs, PagedKV, Selection

__all__ = ["DecodeAttention", "DecodePart", "SelectionObserver"]

#: ``(layer_id, queries [B, Hq, D], step, selection)``, called after every selection.
SelectionObserver = Callable[[int, Tensor, DecodeStep, Selection], None]


@dataclass(kw_only=True)
class DecodePart:
    """Requests of a step that are attended in one way, through all layers.

    Attributes:
        step: the requests.
        attend: ``(layer_id, q [B, Hq, D], part) -> [B, Hq, Dv]``.
        dense: ``[B] bool``, requests that are attended densely all the same; None: nobody is.
        width: K of the selections, for those who are.
        selection: the last one made, with the number of its group of layers.
    """

    step: DecodeStep
    attend: Callable[[int, Tensor, DecodePart], Tensor]
    dense: Tensor | None = None
    width: int = 0
    selection: tuple[int, Selection] | None = None


class DecodeAttention:
    """Select, swap in, attend.

    Args:
        policy: shapes of the model and what selections have to keep to.
        algorithm: selects.
        manager: brings the selected pages in.
        adapter: attends.
        tail: what estimates the pages that are not selected, if anything does.
        reuse_layers: layers that share a selection: that of the first of them that is sparse.

    Attributes:
        observer: sees every selection; None: nobody does.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        algorithm: BaseSparseAlgorithm,
        manager: SparseKVCacheManager,
        adapter: BackendAdapter,
        *,
        tail: TailEstimate | None = None,
        reuse_layers: int = 1,
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._manager = manager
        self._adapter = adapter
        self._tail = tail
        self._reuse_layers = reuse_layers
        self.observer: SelectionObserver | None = None

    def attention(
        self, layer_id: int, q: Tensor, parts: Sequence[DecodePart], indexer: IndexerInputs | None
    ) -> Tensor:
        """``q [B, Hq, D]`` -> ``[B, Hq, Dv]``; each part serves its requests in its way."""
        if indexer is not None:
            for part in parts:
                index = part.step.index
                own = indexer if index is None else indexer.take(index)
                part.step = replace(part.step, indexer=own)
        if len(parts) == 1:
            return parts[0].attend(layer_id, q, parts[0]).to(q.dtype)
        out = q.new_empty(*q.shape[:-1], self._policy.kv.v_head_dim)
        for part in parts:
            index = part.step.index
            out[index] = part.attend(layer_id, q[index], part).to(q.dtype)
        return out

    def attend_sparse(self, layer_id: int, q: Tensor, part: DecodePart) -> Tensor:
        """Over the pages that the algorithm selects, and an estimate of the others if asked for."""
        group = layer_id // self._reuse_layers
        if part.selection is None or part.selection[0] != group:
            part.selection = group, self._select(layer_id, q, part)
        attended = self._attend_selection(layer_id, q, part, part.selection[1], sparse=True)
        if self._tail is not None:
            queries, selection = self._by_row(q), part.selection[1]
            estimate = self._tail.attend(layer_id, queries, selection, part.step)
            attended = merge_attended(attended, estimate)
        return self._by_request(attended)

    def _select(self, layer_id: int, q: Tensor, part: DecodePart) -> Selection:
        selection = self._algorithm.retrieve_topk(q, layer_id, part.step)
        most, dense = self._policy.max_pages, part.dense
        if self._algorithm.variable_lengths:
            more = part.step.num_pages[:, None] > most
            capped = (selection.lengths == most) & more
            capped = capped if dense is None else capped & ~dense[:, None]
            self._manager.counters.count_capped(capped.flatten())
        if self.observer is not None:
            self.observer(layer_id, q, part.step, selection)
        return selection if dense is None else _or_all(selection, dense, part)

    def attend_resident(self, layer_id: int, q: Tensor, part: DecodePart) -> Tensor:
        """Dense, over a context that fits the row's device pages."""
        # No row has more device pages, so no context that fits has.
        width = min(part.step.max_pages, self._manager.device.max_row_pages)
        selection = _all_pages(part.step, width)
        return self._by_request(self._attend_selection(layer_id, q, part, selection, sparse=False))

    def _attend_selection(
        self, layer_id: int, q: Tensor, part: DecodePart, selection: Selection, *, sparse: bool
    ) -> Attended:
        step, size = part.step, self._policy.kv.page_size
        table = self._manager.swap_in(layer_id, selection, step)
        lengths, tail_lens = selection.lengths.flatten(), step.tail_row_lens
        if sparse and self._algorithm.ranks_tail:
            # A selection that fills the budget leaves no room for the tail page.
            has_room = selection.lengths < self._policy.max_pages
            has_room = has_room if part.dense is None else has_room | part.dense[:, None]
            tail_lens = tail_lens * has_room.flatten()
        # All pages are full but the last one, the tail.
        seq_lens = torch.add(tail_lens, lengths, alpha=size)
        kv = self._manager.device.layer(layer_id)
        return self._adapter.attend(self._by_row(q), kv, table, seq_lens, self._policy.scale)

    def _by_row(self, q: Tensor) -> Tensor:
        rows: Tensor = q.unflatten(1, (self._policy.heads, -1)).flatten(0, 1)
        return rows

    def _by_request(self, attended: Attended) -> Tensor:
        out: Tensor = attended.out.unflatten(0, (-1, self._policy.heads)).flatten(1, 2)
        return out

    def attend_staged(self, layer_id: int, q: Tensor, part: DecodePart) -> Tensor:
        """Dense, over a context that does not fit: host pages in tiles, merged by log-sum-exp."""
        size, step = self._policy.kv.page_size, part.step
        out = q.new_empty(*q.shape[:-1], self._policy.kv.v_head_dim, dtype=torch.float32)
        seq_lens = step.num_pages * size + step.tail_lens
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


def _all_pages(step: DecodeStep, width: int) -> Selection:
    """The selection of every full page, as wide as the longest context needs."""
    pages = torch.arange(max(width, 1), dtype=torch.int32, device=step.num_pages.device)
    pages = torch.where(pages < step.num_pages[:, None], pages, -1)
    heads = step.policy.heads
    return Selection(
        pages[:, None].expand(-1, heads, -1), step.num_pages[:, None].expand(-1, heads)
    )


def _or_all(selection: Selection, dense: Tensor, part: DecodePart) -> Selection:
    """All pages of the requests ``dense [B] bool``, of the others what is selected."""
    pages, lengths = selection
    everything = _all_pages(part.step, part.width)
    pages = torch.nn.functional.pad(pages, (0, part.width - pages.shape[-1]), value=-1)
    return Selection(
        torch.where(dense[:, None, None], everything.pages, pages),
        torch.where(dense[:, None], everything.lengths, lengths),
    )
