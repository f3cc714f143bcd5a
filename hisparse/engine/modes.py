"""Decides the attention mode of each request, and which layers share a selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hisparse.algorithms import DecodeStep, SelectionPolicy
from hisparse.algorithms.step import AttentionMode
from hisparse.cache import Counters
from hisparse.cache.counters import CHOICES
from hisparse.cache.formats import format_of


class Runs(NamedTuple):
    """Which drafts of a chain can be served in one step, a run.

    Attributes:
        ends: ``[B, n] bool``, whether a run ends with this token of the chain.
        max_tokens: ``[B]``, the most tokens of a run.
    """

    ends: np.ndarray
    max_tokens: np.ndarray


class ModeMasks(NamedTuple):
    """The mode of each request, ``[B] bool`` each; every request has exactly one.

    Attributes:
        sparse: attends over the pages that the algorithm selects.
        resident: attends densely, over a context that fits the row's device pages.
        streamed: attends densely, over a context that does not fit.
    """

    sparse: np.ndarray
    resident: np.ndarray
    streamed: np.ndarray


def divide(step: DecodeStep, masks: ModeMasks) -> dict[AttentionMode, DecodeStep]:
    """Divide the requests of a step by mode; modes without a request are left out."""
    modes: tuple[AttentionMode, ...] = ("sparse", "resident", "streamed")
    return {
        mode: step if mask.all() else step.take(np.flatnonzero(mask))
        for mode, mask in zip(modes, masks, strict=True)
        if mask.any()
    }


class RequestChoices:
    """Counts what is decided for requests: each choice when a request first gets it.

    Args:
        counters: count requests by choice.
        num_slots: request slots.

    Attributes:
        observer: called with the request slot, the choice and its tokens, or None.
    """

    def __init__(self, counters: Counters, num_slots: int) -> None:
        self._counters = counters
        self._made = {choice: np.zeros(num_slots, dtype=np.bool_) for choice in CHOICES}
        self.observer: Callable[[int, str, int], None] | None = None

    def begin(self, slot: int) -> None:
        """Start a request in a slot."""
        for made in self._made.values():
            made[slot] = False

    def keep(self, slot: int) -> None:
        """What the request in a slot goes on with is its own: it reuses nothing from now on."""
        self._made["reused"][slot] = True

    def add(self, choice: str, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Count a choice of the requests in ``slots [B]``, made at ``tokens [B]``."""
        made = self._made[choice]
        for at in np.flatnonzero(~made[slots]).tolist():
            slot = int(slots[at])
            if not made[slot]:  # A chain of drafts names its request several times.
                made[slot] = True
                self._counters.add(choice, 1)
                if self.observer is not None:
                    self.observer(slot, choice, int(tokens[at]))


class AttentionModes:
    """Decides whether a request is sparse by the request's own length only.

    Args:
        min_sparse_context: tokens; contexts up to this length are attended densely.
        dense_layers: layers that are always dense.
        reuse_layers: consecutive layers that share a selection, of those that select in the model;
            the model's other layers are in the group of the one before. Layers with a window are in
            no group, and no mode applies to them: they attend the last pages of every request.

    Attributes:
        dense_layers: as given, without those that have a window.
        dense_width: K of a selection that can also hold all pages of a dense context.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        *,
        min_sparse_context: int,
        dense_layers: frozenset[int],
        reuse_layers: int,
    ) -> None:
        self._policy = policy
        self._min_sparse_context = min_sparse_context
        self._token_bytes = format_of(policy.kv).token_bytes
        layers = policy.kv.full_layers
        self.dense_layers = dense_layers.intersection(layers)
        self._num_dense = len(self.dense_layers)
        self._windowed = frozenset(range(policy.kv.num_layers)).difference(layers)
        # Each layer that selects, with the number of layers that attend its selection.
        self._attended_by: dict[int, int] = {}
        firsts = [*map(layers.index, policy.kv.selecting_layers[::reuse_layers]), len(layers)]
        for first, end in pairwise(firsts):
            sparse = [x for x in layers[first:end] if x not in dense_layers]
            if sparse:
                self._attended_by[sparse[0]] = len(sparse)
        longest_dense = (min_sparse_context - 1) // policy.kv.page_size
        self.dense_width = max(policy.max_pages, longest_dense)
        # A selection of fixed length includes every page of a context within the budget.
        self._selects_all = not policy.variable_lengths and longest_dense <= policy.budget_pages

    def selects(self, layer_id: int) -> bool:
        """Whether a layer selects: it is the first layer of its group that is not dense."""
        return layer_id in self._attended_by

    def attended_by(self, layer_id: int) -> int:
        """Layers that attend the selection of ``layer_id``, itself included."""
        return self._attended_by[layer_id]

    def of_layer(self, layer_id: int, step: DecodeStep) -> Mapping[AttentionMode, DecodeStep]:
        """The requests of a step by the mode in which a layer attends them."""
        if layer_id in self._windowed:
            return {"window": step}
        return step.dense_by_mode if layer_id in self.dense_layers else step.by_mode

    def of(self, seq_lens: np.ndarray, capacities: np.ndarray) -> ModeMasks:
        """Modes in a layer that attends sparsely.

        Args:
            seq_lens: ``[B] int64``, tokens of each request, the new one included.
            capacities: ``[B]``, device pages of each of its rows.
        """
        num_pages = (seq_lens - 1) // self._policy.kv.page_size
        sparse = ~self.is_dense(seq_lens)
        if sparse.any() and not self._policy.variable_lengths:
            # The selection of a short context holds all of its pages: one call serves all requests.
            sparse |= num_pages <= self._policy.budget_pages
        fits = capacities >= num_pages
        return ModeMasks(sparse, ~sparse & fits, ~sparse & ~fits)

    def is_dense(self, seq_lens: np.ndarray) -> np.ndarray:
        """Requests of ``seq_lens [B]`` tokens that attend their whole context in every layer."""
        within_budget = (seq_lens - 1) // self._policy.kv.page_size <= self._policy.budget_pages
        return within_budget | (seq_lens <= self._min_sparse_context)

    def choices(self, seq_lens: np.ndarray, masks: ModeMasks) -> dict[str, np.ndarray]:
        """What is decided for each request, ``[B] bool`` by choice; every request has exactly one.

        A context within the budget is resident, also where one call selects for all requests.

        Args:
            seq_lens: ``[B] int64``, tokens of each request, the new one included.
            masks: those of :meth:`of`.
        """
        dense = self.is_dense(seq_lens)
        resident = dense & ~masks.streamed
        return {"resident": resident, "streamed": masks.streamed, "sparse": ~dense}

    def runs(self, seq_lens: np.ndarray, capacities: np.ndarray) -> Runs:
        """Which drafts can be served in one step.

        Their mode and their tail page are the same, and their rows have room for all pages that
        they select.

        Args:
            seq_lens: ``[B, n] int64``, tokens up to each token of the chain.
            capacities: ``[B]``, device pages of each of a request's rows.
        """
        size = self._policy.kv.page_size
        dense = self.is_dense(seq_lens)
        ends = seq_lens % size == 0
        ends[:, :-1] |= dense[:, :-1] != dense[:, 1:]
        selections = (capacities // self._policy.max_pages).clip(min=1)
        fits = capacities >= seq_lens[:, -1] // size
        return Runs(ends, np.where(fits, seq_lens.shape[1], selections))

    def of_dense_layers(self, seq_lens: np.ndarray, capacities: np.ndarray) -> ModeMasks | None:
        """Modes in a layer that is always dense, or None if the model has no such layer.

        Args:
            seq_lens: ``[B] int64``, tokens of each request, the new one included.
            capacities: ``[B]``, device pages of each of its rows.
        """
        if not self._num_dense:
            return None
        fits = capacities >= (seq_lens - 1) // self._policy.kv.page_size
        return ModeMasks(np.zeros_like(fits), fits, ~fits)

    def dense_requests(self, num_pages: Tensor, seq_lens: Tensor) -> Tensor | None:
        """Decide on the device which requests of a captured step are dense.

        Args:
            num_pages: ``[B] int32``, full pages.
            seq_lens: ``[B] int64``, tokens.

        Returns:
            ``[B] bool``, or None if every selection of a dense context holds all of its pages.
        """
        if self._selects_all:
            return None
        return (num_pages <= self._policy.budget_pages) | (seq_lens <= self._min_sparse_context)

    def count(
        self, counters: Counters, seq_lens: np.ndarray, masks: ModeMasks, dense: ModeMasks | None
    ) -> None:
        """Add the numbers that the host knows of a step: ``seq_lens [B]``, for all layers."""
        kv, heads = self._policy.kv, self._policy.heads
        counters.add("written_bytes", len(seq_lens) * self._token_bytes)
        counters.add("selections", len(self._attended_by) * heads * int(masks.sparse.sum()))
        tail_lens = (seq_lens - 1) % kv.page_size + 1

        def attended_tokens(streamed: np.ndarray) -> int:
            return heads * int(np.where(streamed, seq_lens, tail_lens).sum())

        num_full = len(kv.full_layers)
        attended = (num_full - self._num_dense) * attended_tokens(masks.streamed)
        if num_full < kv.num_layers:
            in_window = attended_tokens(np.zeros_like(masks.streamed))
            attended += (kv.num_layers - num_full) * in_window
        if dense is not None:
            attended += self._num_dense * attended_tokens(dense.streamed)
        counters.add("other_tokens", attended)
