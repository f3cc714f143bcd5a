"""Scoring and choosing pages: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.select_rule import SelectRule
from hisparse.types import Selection

__all__ = ["page_score", "select"]


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    impl: str = "auto",
) -> Tensor:
    """Quest's criticality: the largest q.k that a page's key range allows.

    ``sum_d max(q_d * high_d, q_d * low_d)``; https://arxiv.org/abs/2406.10774, section 3.3.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        summaries: ``[host pages, Hkv, 2D]``, channel-wise maxima of the keys, then minima.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages that a request has.
        impl: implementation.

    Returns:
        ``[B, Hq, P] float32``, -inf where there is no page; higher is more critical.
    """
    batch, q_heads, dim = query.shape
    check_tensor("query", query, torch.float32, (None, None, None))
    check_tensor("summaries", summaries, summaries.dtype, (None, None, 2 * dim))
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None))
    check_tensor("num_pages", num_pages, torch.int32, (batch,))
    if q_heads % summaries.shape[1]:
        raise KernelError(
            f"summaries: got {summaries.shape[1]} heads, expected a divisor of the {q_heads} "
            "query heads"
        )
    module = implementation(impl, query.device, summaries.device)
    scores: Tensor = module.page_score(query, summaries, host_page_table, num_pages)
    return scores


def select(
    scores: Tensor,
    num_pages: Tensor,
    *,
    heads: int,
    max_pages: int,
    num_sinks: int,
    num_recents: int,
    rest: Tensor | None = None,
    mass: float | None = None,
    within: float | None = None,
    impl: str = "auto",
) -> Selection:
    """Sinks, recent pages and the best of the others, at most ``max_pages``.

    Heads that share a selection agree on one score per page: each head's scores become a softmax
    over its pages, then the shares of the group are added. A head with one peak counts as much as
    one with many high logits, which raw sums or maxima do not give (measured: about a third less
    divergence from dense attention).

    How many of the others: all that ``max_pages`` leaves room for; with ``mass``, the fewest whose
    shares bring what is kept to that part of each group's softmax (Twilight,
    https://arxiv.org/abs/2502.02770); with ``within``, those whose score is at least the head's
    best minus it in some head of the group (DIPR, https://arxiv.org/abs/2504.10326).

    Args:
        scores: ``[B, heads', P] float32``, in units of attention logits, higher is kept.
        num_pages: ``[B] int32``, at most P.
        heads: H; heads' is a multiple of it, or the other way round.
        max_pages: K.
        num_sinks, num_recents: first and last pages that are always selected.
        rest: ``[B, heads'] float32``, score of what is attended in any case and is no page here,
            the tail page: it takes part in the softmax, and in the best score. None: nothing.
        mass: in (0, 1].
        within: not negative, in units of attention logits.
        impl: implementation.

    Returns:
        pages in ascending order: host reads are sequential, and the order of the sum in attention
        does not depend on the scores.

    Raises:
        KernelError: a tensor has another shape or dtype; both ``mass`` and ``within`` are given,
            or out of range.
    """
    check_tensor("scores", scores, torch.float32, (None, None, None))
    check_tensor("num_pages", num_pages, torch.int32, (scores.shape[0],))
    if rest is not None:
        check_tensor("rest", rest, torch.float32, scores.shape[:2])
    if scores.shape[1] % heads and heads % scores.shape[1]:
        raise KernelError(
            f"scores: got {scores.shape[1]} heads, expected a multiple or a divisor of {heads}"
        )
    rule = SelectRule(heads, max_pages, num_sinks, num_recents, mass, within)
    _check_rule(rule)
    module = implementation(impl, scores.device)
    return Selection(*module.select(scores, num_pages, rest, rule))


def _check_rule(rule: SelectRule) -> None:
    mass, within = rule.mass, rule.within
    if mass is not None and within is not None:
        raise KernelError(f"got mass {mass} and within {within}, expected one of the two")
    if mass is not None and not 0 < mass <= 1:
        raise KernelError(f"mass: got {mass}, expected more than 0 and at most 1")
    if within is not None and not within >= 0:
        raise KernelError(f"within: got {within}, expected at least 0")
