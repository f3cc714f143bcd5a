"""Decode attention of one layer: select, swap in, attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hisparse.adapters import Attended, add_sinks
from hisparse.algorithms import DecodeStep
from hisparse.cache import PageTable, Selected, StepRows
from hisparse.engine.contract import blame, call, named, require_selection
from hisparse.engine.extensions.base import overriding
from hisparse.engine.parts import EngineParts
from hisparse.engine.staged import StagedAttention
from hisparse.engine.step import DecodePart
from hisparse.errors import AlgorithmError
from hisparse.kernels import serial_operators
from hisparse.types import Selection

__all__ = ["DecodeAttention", "SelectionObserver"]

#: ``(layer_id, queries [B, Hq, D], step, selection)``, called after every selection.
SelectionObserver = Callable[[int, Tensor, DecodeStep, Selection], None]


class DecodeAttention:
    """Attention of the new token of each request, in the request's mode.

    Args:
        parts: the parts of the engine.

    Attributes:
        observer: called after every selection; None: no callback.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._staged = StagedAttention(parts)
        # A dense context that a captured step serves fits its row.
        self._dense_width = min(parts.modes.dense_width, parts.manager.device.max_row_pages)
        self._refining = overriding("refine_selection", parts.extensions)
        self._after_selection = overriding("after_selection", parts.extensions)
        self._after_attention = overriding("after_attention", parts.extensions)
        # These read the selection: of this layer or, in the part, of the layer before.
        self._has_readers = bool(
            self._after_attention or overriding("before_layer", parts.extensions)
        )
        self.observer: SelectionObserver | None = None

    def attention(
        self, layer_id: int, q: Tensor, parts: Sequence[DecodePart], sinks: Tensor | None = None
    ) -> Tensor:
        """``q [B, Hq, D]`` -> ``[B, Hq, Dv]`` in the dtype of q, each part in its mode.

        ``sinks [Hq]``: see :meth:`SparseCoordinator.attention`.
        """
        if len(parts) == 1:
            return self._attend(layer_id, q, parts[0], sinks).to(q.dtype)
        out = q.new_empty(*q.shape[:-1], self._parts.policy.kv.v_head_dim)
        for part in parts:
            out[part.index] = self._attend(layer_id, q[part.index], part, sinks).to(q.dtype)
        return out

    def _attend(self, layer_id: int, q: Tensor, part: DecodePart, sinks: Tensor | None) -> Tensor:
        if part.mode == "staged":
            return self._staged.attend(layer_id, q, part, sinks)
        if part.mode == "sparse":
            attended = self._attend_sparse(layer_id, q, part)
        else:
            attended = self._attend_all(layer_id, q, part)
        out = attended.out.reshape(len(q), self._parts.policy.kv.num_q_heads, -1)
        if sinks is None:
            return out
        return add_sinks(Attended(out, attended.lse.reshape(out.shape[:-1])), sinks).out

    def _attend_sparse(self, layer_id: int, q: Tensor, part: DecodePart) -> Attended:
        """Attend over the selected pages; extensions refine the selection and the result."""
        modes, followers = self._parts.modes, []
        if modes.selects(layer_id):
            part.selection = self._select(layer_id, q, part)
            followers = modes.followers(layer_id)
        selection = part.selection
        assert selection is not None, "the first layer of a group selects"
        queries = self._row_queries(q)
        with serial_operators(q.device):
            selected = self._selected(selection, part)
            try:
                table = self._parts.manager.swap_in(layer_id, selected, part.rows, followers)
                attended = self._attend_pages(layer_id, queries, table)
            except Exception as error:
                blame(error, layer_id, selection, part.rows, self._parts.algorithm)
                raise
        for extension in self._after_attention:
            attended = call(
                extension.after_attention, layer_id, layer_id, queries, selection, part, attended
            )
        return attended

    def _attend_all(self, layer_id: int, q: Tensor, part: DecodePart) -> Attended:
        """Attend over the whole context or the window, which fit the row's device pages."""
        manager = self._parts.manager
        if part.mode == "window":
            selected = Selected(part.selection)
        else:
            # A context that fits has at most as many pages as the largest row.
            width = max(1, min(part.view.max_pages, manager.device.max_row_pages))
            selected = Selected(None, max_pages=width)
        with serial_operators(q.device):
            table = manager.swap_in(layer_id, selected, part.rows)
            return self._attend_pages(layer_id, self._row_queries(q), table)

    def _selected(self, selection: Selection, part: DecodePart) -> Selected:
        """What a sparse part attends over, its dense requests included."""
        policy = self._parts.policy
        return Selected(
            selection,
            dense=part.dense,
            max_pages=None if part.dense is None else self._dense_width,
            # A selection that fills the budget excludes the tail page.
            tail_below=policy.max_pages if self._parts.algorithm.ranks_tail else None,
        )

    def _select(self, layer_id: int, q: Tensor, part: DecodePart) -> Selection:
        """Select pages for ``q [B, Hq, D]``, the heads of this rank."""
        selection = self._retrieve(layer_id, q, part)
        self._count_capped(selection, part)
        for extension in self._refining:
            refined = call(extension.refine_selection, layer_id, layer_id, q, selection, part)
            selection = require_selection(
                refined, extension, "refine_selection", layer_id, self._parts.policy, len(q)
            )
        for extension in self._after_selection:
            call(extension.after_selection, layer_id, layer_id, selection, part)
        if self.observer is not None:
            self.observer(layer_id, q, part.view, selection)
        if part.dense is None or not self._has_readers:
            return selection
        # `before_layer` and `after_attention` see what dense requests attend.
        return _all_where(part.dense, selection, part.rows, self._dense_width)

    def _retrieve(self, layer_id: int, q: Tensor, part: DecodePart) -> Selection:
        """The algorithm's selection; with ``checked``, wait for the count of invalid scores."""
        algorithm, manager = self._parts.algorithm, self._parts.manager
        before = int(manager.counters.total("invalid_scores")) if manager.checked else 0
        queries = self._parts.selecting_queries(q)
        found = call(algorithm.retrieve_topk, layer_id, queries, layer_id, part.view)
        selection = require_selection(
            found, algorithm, "retrieve_topk", layer_id, self._parts.policy, len(q)
        )
        if manager.checked:
            invalid = int(manager.counters.total("invalid_scores")) - before
            if invalid:
                raise AlgorithmError(
                    f"{named(algorithm, 'retrieve_topk', layer_id)}: got NaN or +inf among the "
                    f"scores of {invalid} of {selection.lengths.numel()} selections, expected "
                    "numbers or -inf"
                )
        return selection

    def _count_capped(self, selection: Selection, part: DecodePart) -> None:
        """Count selections of varying length that ``max_pages`` cut short."""
        if not self._parts.algorithm.variable_lengths:
            return
        max_pages = self._parts.policy.max_pages
        capped = (selection.lengths == max_pages) & (part.view.num_pages[:, None] > max_pages)
        if part.dense is not None:
            capped = capped & ~part.dense[:, None]
        self._parts.manager.counters.count("capped_selections", capped)

    def _attend_pages(self, layer_id: int, queries: Tensor, table: PageTable) -> Attended:
        """Attend ``queries [R, Q, D]`` over the device pages of each row."""
        device, policy = self._parts.manager.device, self._parts.policy
        return device.format.attend(
            self._parts.adapter,
            queries,
            device.stored(layer_id),
            *table,
            policy.rules[layer_id],
            policy.max_pages,
        )

    def _row_queries(self, q: Tensor) -> Tensor:
        """``[B, Hq, D]`` -> ``[R, Hq / H, D]``."""
        policy = self._parts.policy
        return q.reshape(-1, policy.kv.num_q_heads // policy.heads, q.shape[-1])


def _all_where(dense: Tensor, selection: Selection, rows: StepRows, width: int) -> Selection:
    """Replace ``selection`` by all pages for the requests ``dense [B] bool``."""
    everything = rows.every_page(width)
    pages = torch.nn.functional.pad(
        selection.pages, (0, width - selection.pages.shape[-1]), value=-1
    )
    return Selection(
        torch.where(dense[:, None, None], everything.pages, pages),
        torch.where(dense[:, None], everything.lengths, selection.lengths),
    )
