"""Exact logits of keys in C++; sums are in another order than PyTorch's."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.keys.op import GRAPH_SCORE, KEY_SCORE, GraphSearch, KeyGraphs

__all__ = ["graph_score", "key_score"]


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    pages: Tensor | None,
    reduce: str,
    logit_cap: float,
) -> Tensor:
    """See :func:`hisparse.kernels.key_score`."""
    more = (reduce == "lse", logit_cap)
    return KEY_SCORE.on_cpu(query, keys, host_page_table, num_pages, pages, more=more)[0]


def graph_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    graphs: KeyGraphs,
    best: Tensor,
    search: GraphSearch,
) -> Tensor:
    """See :func:`hisparse.kernels.graph_score`."""
    inputs = (query, keys, host_page_table, num_pages, graphs.addresses, graphs.tokens, best)
    more = (graphs.links_per_token, graphs.entry_stride, search.threshold, search.within)
    return GRAPH_SCORE.on_cpu(*inputs, more=more)[0]
