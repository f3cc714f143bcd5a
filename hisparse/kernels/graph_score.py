"""DIPR's search in a graph over keys in host memory: checked entry point."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.kernels.checks import check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.key_score import check_key_inputs

__all__ = ["KeyGraphs", "graph_score"]

_CPU = torch.device("cpu")


class KeyGraphs(NamedTuple):
    """A graph over each request's keys, one for each KV head.

    Attributes:
        addresses: ``[B] int64``, of ``[Hkv, tokens, links per token] int32``: positions that each
            position is linked to, -1 for none. Whoever calls keeps them alive.
        tokens: ``[B] int64``, how many; 0: there is no graph.
        links_per_token: the same for all.
        entry_stride: a search begins with every so many tokens.
    """

    addresses: Tensor
    tokens: Tensor
    links_per_token: int
    entry_stride: int


def graph_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    graphs: KeyGraphs,
    best: Tensor,
    *,
    within: float,
    threshold: int,
    impl: str = "auto",
) -> Tensor:
    """The largest q.k in each page among the tokens that a search for what is in range sees.

    DIPRS, AlayaDB's algorithm 1 (https://arxiv.org/abs/2504.10326), best candidate first: until
    ``threshold`` candidates are explored all of them are, then only critical ones, those with a
    q.k of at least the best one so far minus ``within``. To explore a token is to score the tokens
    that it is linked to. Scores are exact; tokens in range may be missed.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        keys: ``[host pages, Hkv, S, D]`` float32, bfloat16 or float16; any strides, but D dense.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages that a request has; what a graph has beyond is passed over.
        graphs: where to go from a token.
        best: ``[B, Hq] float32``, the best q.k that is known without the graphs; -inf for none.
        within: beta, in units of attention logits.
        threshold: l0, candidates that are explored in any case.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf for pages of which no token was seen.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is not in the pool.
    """
    batch, q_heads = query.shape[:2]
    check_key_inputs(query, keys, host_page_table, num_pages)
    check_tensor("graphs.addresses", graphs.addresses, torch.int64, (batch,), _CPU)
    check_tensor("graphs.tokens", graphs.tokens, torch.int64, (batch,), _CPU)
    check_tensor("best", best, torch.float32, (batch, q_heads))
    module = implementation(impl, query.device, keys.device)
    scores: Tensor = module.graph_score(
        query, keys, host_page_table, num_pages, graphs, best, within, threshold
    )
    return scores
