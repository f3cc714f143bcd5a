"""DIPR's search in a graph over keys in host memory: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.key_graphs import GraphSearch, KeyGraphs
from hisparse.kernels.key_score import check_key_inputs

__all__ = ["GraphSearch", "KeyGraphs", "graph_score"]

_CPU = torch.device("cpu")


def graph_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    graphs: KeyGraphs,
    best: Tensor,
    search: GraphSearch,
    *,
    impl: str = "auto",
) -> Tensor:
    """The largest q.k in each page among the tokens that a graph search sees.

    DIPRS, AlayaDB's algorithm 1 (https://arxiv.org/abs/2504.10326). The search explores candidates
    best first. It explores the first ``search.threshold`` candidates in any case, then critical
    ones only. To explore a token is to score the tokens that it is linked to. Scores are exact; a
    token in range may be missed. CPU only.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        keys: ``[host pages, Hkv, S, D]`` float32, bfloat16 or float16; any strides, but D dense.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request; a graph's tokens beyond them are skipped.
        graphs: the links between tokens.
        best: ``[B, Hq] float32``, the best q.k that is known without the graphs; -inf for none.
        search: when the search stops.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf for a page without a token that was seen.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is not in the pool.
    """
    check_key_inputs(query, keys, host_page_table, num_pages)
    check_once(_check, graphs.addresses, graphs.tokens, best, values=(query.shape[:2],))
    module = implementation(impl, query.device, keys.device)
    scores: Tensor = module.graph_score(
        query, keys, host_page_table, num_pages, graphs, best, search
    )
    return scores


def _check(addresses: Tensor, tokens: Tensor, best: Tensor, query_heads: tuple[int, int]) -> None:
    batch = query_heads[0]
    check_tensor("graphs.addresses", addresses, torch.int64, (batch,), _CPU)
    check_tensor("graphs.tokens", tokens, torch.int64, (batch,), _CPU)
    check_tensor("best", best, torch.float32, query_heads, _CPU)
