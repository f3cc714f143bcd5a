"""The graphs that ``graph_score`` searches, and how far a search goes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["GraphSearch", "KeyGraphs"]


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
