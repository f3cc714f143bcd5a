"""Exact logits of keys where they lie in host memory: of whole pages, or by a graph search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg, Result, check_divides
from hisparse.kernels.operation import Operation

__all__ = ["GraphSearch", "KeyGraphs", "graph_score", "key_score"]


class KeyGraphs(NamedTuple):
    """A graph over each request's keys, one for each KV head.

    Attributes:
        addresses: ``[B] int64``, address of each request's links
            ``[Hkv, tokens, links per token] int32``: the positions that a position is linked to,
            -1 for none. The caller keeps that memory alive.
        tokens: ``[B] int64``, tokens of each graph; 0 for a request without a graph.
        links_per_token: the same for all graphs.
        entry_stride: a search starts from every ``entry_stride``-th token.
    """

    addresses: Tensor
    tokens: Tensor
    links_per_token: int
    entry_stride: int


class GraphSearch(NamedTuple):
    """When a search stops.

    Attributes:
        within: beta, in units of attention logits; a candidate is critical if its q.k is at least
            the best one so far minus ``within``.
        threshold: l0, candidates that are explored whether they are critical or not.
    """

    within: float
    threshold: int


def _heads_divide(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    check_divides("keys", sizes["Hkv"], sizes["Hq"])


_INPUTS = (
    Arg("query", torch.float32, "B Hq D", on=("cpu",), layout="all"),
    Arg("keys", FLOATS, "_ Hkv _ D", layout="any"),
    Arg("host_page_table", torch.int32, "B P"),
    Arg("num_pages", torch.int32, "B", layout="all"),
)
KEY_SCORE = Operation(
    __name__,
    "key_score",
    *_INPUTS,
    Arg("pages", torch.bool, "B Hq P", optional=True, layout="all"),
    Result("scores", torch.float32, "B Hq P"),
    cpu=lambda call, query, keys, host_page_table, num_pages, pages, reduce, logit_cap: call(
        query, keys, host_page_table, num_pages, pages, reduce == "lse", logit_cap
    ),
    also=_heads_divide,
)
GRAPH_SCORE = Operation(
    __name__,
    "graph_score",
    *_INPUTS,
    Arg("graphs.addresses", torch.int64, "B", layout="all"),
    Arg("graphs.tokens", torch.int64, "B", layout="all"),
    Arg("best", torch.float32, "B Hq", layout="all"),
    Result("scores", torch.float32, "B Hq P"),
    cpu=lambda call, query, keys, host_page_table, num_pages, graphs, best, search: call(
        query,
        keys,
        host_page_table,
        num_pages,
        *graphs[:2],
        best,
        *graphs[2:],
        search.threshold,
        search.within,
    ),
    also=_heads_divide,
)


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    reduce: Literal["max", "lse"] = "max",
    logit_cap: float = 0.0,
    pages: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Score pages by their exact q.k, from keys where they lie in host memory.

    A page's score depends on nothing but its keys and the query: fewer ``pages`` change no bit of
    the others' scores. CPU only.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        keys: ``[host pages, Hkv, S, D]``, float32, bfloat16 or float16; any strides, but D dense.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        reduce: how a page's S products become its score: "max", the largest, or "lse",
            log-sum-exp.
        logit_cap: the products are capped at first, as in attention with this cap; 0: none.
        pages: ``[B, Hq, P] bool``, pages to score; None: all.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf beyond a request's pages and for pages that are not scored.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is not in the pool.
    """
    if reduce not in ("max", "lse"):
        raise KernelError(f"reduce: got {reduce!r}, expected max or lse")
    tensors = (query, keys, host_page_table, num_pages, pages)
    run = KEY_SCORE(impl, *tensors)
    _require_dense(keys)
    scores: Tensor = run(*tensors, reduce, logit_cap)
    return scores


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
    tensors = (query, keys, host_page_table, num_pages)
    run = GRAPH_SCORE(impl, *tensors, graphs.addresses, graphs.tokens, best)
    _require_dense(keys)
    scores: Tensor = run(*tensors, graphs, best, search)
    return scores


def _require_dense(keys: Tensor) -> None:
    """Strides are no part of a declaration."""
    if keys.stride(-1) != 1:
        raise KernelError(f"keys: got stride {keys.stride(-1)} in D, expected 1")
