"""DIPR's search in C++; sums are in another order than PyTorch's."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.kernels.key_graphs import GraphSearch, KeyGraphs

__all__ = ["graph_score"]


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
    scores = query.new_empty(*query.shape[:2], host_page_table.shape[1])
    call_cpu(
        "graph_score",
        query.contiguous(),
        keys,
        dense_rows(host_page_table),
        num_pages.contiguous(),
        graphs.addresses.contiguous(),
        graphs.tokens.contiguous(),
        best.contiguous(),
        scores,
        graphs.links_per_token,
        graphs.entry_stride,
        search.threshold,
        search.within,
    )
    return scores
