"""Which requests of a decode step are attended in which way: by each one's own length alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from hisparse.adapters import TableLimits
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.cache.counters import CacheCounters
from hisparse.config import HiSparseConfig
from hisparse.engine.step import DecodeStep, SelectionPolicy

__all__ = ["DecodePlan", "Ways", "attended_tables"]


class Ways(NamedTuple):
    """Requests by the way that they are attended in, ``[B] bool`` each; together all of them.

    Attributes:
        sparse: over what the algorithm selects.
        resident: densely, over a context that fits the row's device pages.
        staged: densely, over one that does not.
    """

    sparse: np.ndarray
    resident: np.ndarray
    staged: np.ndarray


class DecodePlan:
    """Says who is attended how.

    Args:
        policy: shapes of the model and what selections have to keep to.
        algorithm: selects.
        min_sparse_context: contexts up to so many tokens are served dense.
        dense_layers: layers that are always dense.
        reuse_layers: layers that share a selection.

    Attributes:
        width: K of a selection that holds all pages of a dense context, or what is selected.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        algorithm: BaseSparseAlgorithm,
        *,
        min_sparse_context: int,
        dense_layers: frozenset[int],
        reuse_layers: int,
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._min_sparse_context = min_sparse_context
        layers = set(range(policy.kv.num_layers))
        self._num_dense = len(layers & dense_layers)
        self._num_selecting = len({layer // reuse_layers for layer in layers - dense_layers})
        longest_dense = (min_sparse_context - 1) // policy.kv.page_size
        self.width = max(policy.max_pages, longest_dense)
        # A fixed number of pages is all of a context within the budget.
        self._selects_all = not algorithm.variable_lengths and longest_dense <= policy.budget_pages

    def ways(self, seq_lens: np.ndarray, capacities: np.ndarray) -> Ways:
        """Of a sparse layer: tokens of each request and device pages of its rows, ``[B]`` each."""
        num_pages = (seq_lens - 1) // self._policy.kv.page_size
        whole = num_pages <= self._policy.budget_pages
        sparse = ~whole & (seq_lens > self._min_sparse_context)
        if sparse.any() and not self._algorithm.variable_lengths:
            # A fixed number of pages is all of a short context: one call serves them together.
            sparse |= whole
        fits = capacities >= num_pages
        return Ways(sparse, ~sparse & fits, ~sparse & ~fits)

    def dense_ways(self, seq_lens: np.ndarray, capacities: np.ndarray) -> Ways | None:
        """The same of a layer that is always dense; None: there is none."""
        if not self._num_dense:
            return None
        fits = capacities >= (seq_lens - 1) // self._policy.kv.page_size
        return Ways(np.zeros_like(fits), fits, ~fits)

    def dense_requests(self, step: DecodeStep, seq_lens: Tensor) -> Tensor | None:
        """``[B] bool``, whom :meth:`ways` does not call sparse, by tensors alone; None: it makes no
        difference to what is attended.
        """
        if self._selects_all:
            return None
        return (step.num_pages <= self._policy.budget_pages) | (
            seq_lens <= self._min_sparse_context
        )

    def count(
        self, counters: CacheCounters, seq_lens: np.ndarray, ways: Ways, dense: Ways | None
    ) -> None:
        """Count what the host knows of a step, all layers."""
        kv, heads = self._policy.kv, self._policy.heads
        counters.count_written(len(seq_lens) * kv.token_bytes)
        counters.count_chosen(self._num_selecting * heads * int(ways.sparse.sum()))
        tail_lens = (seq_lens - 1) % kv.page_size + 1

        def tokens(staged: np.ndarray) -> int:
            return heads * int(np.where(staged, seq_lens, tail_lens).sum())

        counters.count_tokens((kv.num_layers - self._num_dense) * tokens(ways.staged))
        if dense is not None:
            counters.count_tokens(self._num_dense * tokens(dense.staged))


def attended_tables(
    config: HiSparseConfig,
    policy: SelectionPolicy,
    *,
    max_requests: int,
    max_row_pages: int,
    tile_pages: int,
    context_pages: int,
) -> list[TableLimits]:
    """What decode steps of up to ``max_requests`` attend over.

    Args:
        config: says who is attended how.
        policy: shapes of the model and what selections have to keep to.
        max_requests: requests of a step.
        max_row_pages: device pages of a row.
        tile_pages: pages that fit a tile of staging.
        context_pages: pages of the longest context.
    """
    kv, heads = policy.kv, policy.heads
    stored_heads, queries = kv.num_kv_heads if heads == 1 else 1, kv.num_q_heads // heads
    widest = max(policy.max_pages, (config.min_sparse_context - 1) // kv.page_size)
    widest = max(widest, max_row_pages) if config.dense_layers else widest
    # The tail page as well.
    rows = heads, max_requests * heads
    tables = [TableLimits(*rows, widest + 1, queries, stored_heads, kv.page_size)]
    if config.dense_layers or config.min_sparse_context > config.device_buffer_size:
        tile = TableLimits(1, 1, tile_pages, kv.num_q_heads, kv.num_kv_heads, kv.page_size)
        tables.append(tile)
    if config.tail_estimate:
        tables.append(TableLimits(*rows, context_pages, queries, stored_heads, 1))
    return tables
