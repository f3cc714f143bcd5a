"""Decode attention of one layer, in the three ways that a request can be served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.cache import SparseKVCacheManager, SwapIn, Tile
from hisparse.cache.streams import Started
from hisparse.cache.swap import When
from hisparse.engine.extensions.prefetch import Foreseen, LayerSpeculation, StepSpeculation
from hisparse.engine.extensions.tail_estimate import TailEstimate
from hisparse.engine.sparse_attention import SelectedAttention
from hisparse.engine.step import DecodeStep, SelectionPolicy
from hisparse.kernels import LruDiff
from hisparse.types import IndexerInputs, Selection

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
        selection: that of the group of layers that is attended.
        ahead: pages that the next step finds selected in that group; None: it finds nothing.
        foreseen: what layers that have not begun are going to attend, their pages on their way.
        coming: pages of the layers that share it, on their way before the layer begins.
    """

    step: DecodeStep
    attend: Callable[[int, Tensor, DecodePart], Tensor]
    dense: Tensor | None = None
    width: int = 0
    selection: Selection | None = None
    ahead: Selection | None = None
    foreseen: dict[int, tuple[Foreseen, Started[LruDiff]]] = field(default_factory=dict)
    coming: dict[int, SwapIn] = field(default_factory=dict)


class DecodeAttention:
    """Select, swap in, attend.

    Args:
        policy: shapes of the model and what selections have to keep to.
        algorithm: selects.
        manager: brings the selected pages in.
        adapter: attends.
        tail: what estimates the pages that are not selected, if anything does.
        of_steps: keeps what is selected for the next step, if anything is.
        of_layers: judges what is selected for the next layer, if anything is.
        reuse_layers: layers that share a selection: that of the first of them that is sparse.
        dense_layers: layers that do not select.

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
        of_steps: StepSpeculation | None = None,
        of_layers: LayerSpeculation | None = None,
        reuse_layers: int = 1,
        dense_layers: frozenset[int] = frozenset(),
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._manager = manager
        self._adapter = adapter
        self._selected = SelectedAttention(policy, manager, adapter)
        self._tail = tail
        self._of_steps = of_steps
        self._of_layers = of_layers
        self._reuse_layers = reuse_layers
        self._dense_layers = dense_layers
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
        leads = self.selects(layer_id)
        selection = self._select(layer_id, q, part) if leads else part.selection
        assert selection is not None, "the first layer of a group selects"
        part.selection = selection
        attended = self._attend_selection(layer_id, q, part, selection, leads=leads)
        if self._tail is not None:
            estimate = self._tail.attend(layer_id, self._by_row(q), selection, part.step)
            attended = merge_attended(attended, estimate)
        return self._by_request(attended)

    def selects(self, layer_id: int) -> bool:
        """Whether a layer selects: the first of its group that is not dense does."""
        first = layer_id - layer_id % self._reuse_layers
        sparse = (x for x in range(first, layer_id + 1) if x not in self._dense_layers)
        return next(sparse, None) == layer_id

    def _select(self, layer_id: int, q: Tensor, part: DecodePart) -> Selection:
        selection = self._algorithm.retrieve_topk(q, layer_id, part.step)
        most, dense = self._policy.max_pages, part.dense
        if self._algorithm.variable_lengths:
            more = part.step.num_pages[:, None] > most
            capped = (selection.lengths == most) & more
            capped = capped if dense is None else capped & ~dense[:, None]
            self._manager.counters.count_capped(capped.flatten())
        if self._of_steps is not None:
            selection, part.ahead = self._of_steps.choose(layer_id, q, selection, part.step, dense)
        if self._of_layers is not None and layer_id in part.foreseen:
            foreseen, coming = part.foreseen.pop(layer_id)
            coming.join()
            selection = self._of_layers.choose(foreseen, q, selection, part.step, dense)
        if self.observer is not None:
            self.observer(layer_id, q, part.step, selection)
        return selection if dense is None else _or_all(selection, dense, part)

    def foresee(self, layer_id: int, q: Tensor, parts: Sequence[DecodePart]) -> None:
        """Select for a layer that has not begun, and bring the pages in.

        Args:
            layer_id: number of a layer that selects.
            q: ``[B, Hq, D]``, what its queries are predicted to be.
            parts: of that layer.
        """
        speculation = self._of_layers
        assert speculation is not None, "only a coordinator that foresees is asked to"
        for part in parts:
            if part.attend != self.attend_sparse:
                continue
            own = q if part.step.index is None else q[part.step.index]
            # The layer has not written the new token's key: what lies there is somebody else's.
            written = _without_new_token(part.step)
            selection = self._algorithm.retrieve_topk(own, layer_id, written)
            pages = speculation.pages_to_bring(selection, part.step, part.dense)
            coming = self._manager.prefetch(layer_id, pages, part.step)
            part.foreseen[layer_id] = Foreseen(own, selection), coming

    def prefetch(self, layer_id: int, parts: Sequence[DecodePart]) -> None:
        """Bring in what the next step finds selected; the layer has attended."""
        for part in parts:
            if part.ahead is not None:
                self._manager.prefetch(layer_id, part.ahead, part.step)

    def attend_resident(self, layer_id: int, q: Tensor, part: DecodePart) -> Tensor:
        """Dense, over a context that fits the row's device pages."""
        # No row has more device pages, so no context that fits has.
        width = min(part.step.max_pages, self._manager.device.max_row_pages)
        selection, step = _all_pages(part.step, width), part.step
        swap = self._manager.begin_swap_in(layer_id, selection, step, "now")
        attended = self._selected.at_once(
            layer_id, self._by_row(q), selection, step, step.tail_row_lens, swap
        )
        return self._by_request(attended)

    def _attend_selection(
        self, layer_id: int, q: Tensor, part: DecodePart, selection: Selection, *, leads: bool
    ) -> Attended:
        """``leads``: this is the layer that has selected, for those of its group as well."""
        manager, step, queries = self._manager, part.step, self._by_row(q)
        tail_lens = self._tail_lens(selection, part)
        swap, last_pages = part.coming.pop(layer_id, None), manager.last_pages
        if swap is not None:
            return self._selected.at_once(layer_id, queries, selection, step, tail_lens, swap)
        when: When = "now" if last_pages is None else "beside"
        swap = manager.begin_swap_in(layer_id, selection, step, when)
        if leads and manager.overlaps:
            # Behind the pages that this layer itself waits for.
            for later in self._followers(layer_id):
                part.coming[later] = manager.begin_swap_in(later, selection, step, "ahead")
        if last_pages is None:
            return self._selected.at_once(layer_id, queries, selection, step, tail_lens, swap)
        who = self._is_sparse(part).repeat_interleave(self._policy.heads)
        return self._selected.in_parts(
            layer_id, queries, selection, step, tail_lens, swap, last_pages, who
        )

    def _followers(self, layer_id: int) -> list[int]:
        """The layers that share the selection of the layer that has made it."""
        end = (layer_id // self._reuse_layers + 1) * self._reuse_layers
        later = range(layer_id + 1, min(end, self._policy.kv.num_layers))
        return [layer for layer in later if layer not in self._dense_layers]

    def _is_sparse(self, part: DecodePart) -> Tensor:
        """``[B] bool``, requests that are not attended whole. The others are served in this call or
        in another one as it happens, so they are not split.
        """
        sparse = part.step.num_pages > self._policy.budget_pages
        return sparse if part.dense is None else sparse & ~part.dense

    def _tail_lens(self, selection: Selection, part: DecodePart) -> Tensor:
        """``[R] int32``, tokens of the tail page that are attended."""
        tail_lens = part.step.tail_row_lens
        if not self._algorithm.ranks_tail:
            return tail_lens
        # A selection that fills the budget leaves no room for the tail page.
        has_room = selection.lengths < self._policy.max_pages
        has_room = has_room if part.dense is None else has_room | part.dense[:, None]
        return tail_lens * has_room.flatten()

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
        attended: Attended | None = None
        tiles = self._tiles(layer_id, step)
        for tile, ahead in zip(tiles, [*tiles[1:], None], strict=True):
            own = slice(tile.owner, tile.owner + 1)
            lens = seq_lens[own] - tile.first * size
            new = self._attend_tile(q[own], tile, ahead, lens)
            attended = new if attended is None else merge_attended(attended, new)
            if ahead is None or ahead.owner != tile.owner:
                out[own], attended = attended.out, None
        return out

    def _tiles(self, layer_id: int, step: DecodeStep) -> list[Tile]:
        """All pages of all requests, numbered, the tail pages among them."""
        size, width = self._policy.kv.page_size, self._manager.staging_pages
        tiles = []
        for request, seq_len in enumerate(step.seq_lens_cpu.tolist()):
            pages = step.host_page_table[request, : -(-seq_len // size)]
            for first in range(0, pages.numel(), width):
                end = min((first + width) * size, seq_len)
                tiles.append(Tile(layer_id, request, first, end, pages[first : first + width]))
        return tiles

    def _attend_tile(self, q: Tensor, tile: Tile, ahead: Tile | None, lens: Tensor) -> Attended:
        """``q [1, Hq, D]`` over a tile, of which the request has ``lens [1]`` tokens, or more."""
        manager, kv = self._manager, self._policy.kv
        count = tile.host_pages.numel()
        pages = manager.read_prefix(tile, ahead)
        table = torch.arange(count, dtype=torch.int32, device=q.device)[None]
        lens = lens.clamp(0, count * kv.page_size)
        num_bytes = count * kv.page_size * kv.token_bytes_per_layer
        manager.counters.count_staged(num_bytes, decode=True)
        return self._adapter.attend(q, pages, table, lens, self._policy.scale)


def _without_new_token(step: DecodeStep) -> DecodeStep:
    """The step before the new token is written to the tail page, which may be empty then."""
    return replace(step, tail_lens=step.tail_lens - 1, tail_row_lens=step.tail_row_lens - 1)


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
