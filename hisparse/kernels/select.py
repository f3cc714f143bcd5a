"""Scoring and choosing pages: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_divides, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.select_rule import SelectRule
from hisparse.types import Selection

__all__ = ["SelectRule", "page_score", "select"]

_F32, _I32 = torch.float32, torch.int32
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SUMMARY_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    scales: Tensor | None = None,
    scale: float = 1.0,
    impl: str = "auto",
) -> Tensor:
    """Quest's criticality: the largest q.k that a page's key ranges allow.

    A range allows ``sum_d max(q_d * high_d, q_d * low_d)``; https://arxiv.org/abs/2406.10774,
    section 3.3. A page allows the largest of its ranges.

    Args:
        query: ``[B, Hq, D]`` float32, bfloat16 or float16; any strides.
        summaries: ``[host pages, ranges, Hkv, 2D]``, float32, bfloat16 or float8_e4m3fn; for each
            range the channel-wise maxima of its keys, then their minima.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        scales: ``[host pages, ranges, Hkv] float32``, positive factors of the summaries. None: 1.
        scale: multiplies the scores; positive, such as the softmax scale.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf beyond a request's pages; higher is more critical.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_score, query, summaries, host_page_table, num_pages, scales)
    module = implementation(impl, query.device, summaries.device)
    scores: Tensor = module.page_score(query, summaries, host_page_table, num_pages, scales, scale)
    return scores


def select(
    scores: Tensor,
    num_pages: Tensor,
    rule: SelectRule,
    *,
    forced: Tensor | None = None,
    rest: Tensor | None = None,
    impl: str = "auto",
) -> Selection:
    """The forced pages and the best of the others, at most ``rule.max_pages``.

    Heads that share a selection agree on one score per page. Each head's scores become a softmax
    over its pages, and the group's shares are added. So a head with one peak counts as much as a
    head with many high logits; raw sums or maxima do not give that (measured: about a third less
    divergence from dense attention).

    Args:
        scores: ``[B, heads', P]`` in float32, bfloat16 or float16, of any strides, in units of
            attention logits; higher is kept, of equal scores the first. -inf is allowed. NaN and
            +inf are faults, which ``rule.invalid_scores`` counts; they are taken as -inf and as the
            largest number. Entries without a page are ignored.
        num_pages: ``[B] int32``, at most P.
        rule: how many pages are kept.
        forced: ``[B, P] bool``, pages that are selected whatever their score, such as
            :attr:`hisparse.algorithms.DecodeStep.forced_pages`. None: there are none.
        rest: ``[B, heads'] float32``, score of the tokens that are attended in any case and are no
            page here, such as the tail page's. They take part in the softmax and in the best
            score. None: there are no such tokens.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, H, K]`` pages in ascending order. So host reads are sequential, and the order of the
        sum in attention does not depend on the scores.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    tensors = (scores, num_pages, forced, rest, rule.invalid_scores)
    check_once(_check_select, *tensors, values=(rule.heads,))
    module = implementation(impl, scores.device)
    return Selection(*module.select(scores, num_pages, forced, rest, rule))


def _check_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
) -> None:
    check_tensor("query", query, _FLOATS, (None, None, None))
    (batch, query_heads, dim), device = query.shape, query.device
    check_tensor("summaries", summaries, _SUMMARY_DTYPES, (None, None, None, 2 * dim), device)
    if scales is not None:
        check_tensor("scales", scales, _F32, tuple(summaries.shape[:3]), device)
    check_tensor("host_page_table", host_page_table, _I32, (batch, None), device)
    check_tensor("num_pages", num_pages, _I32, (batch,), device)
    check_divides("summaries", summaries.shape[2], query_heads)


def _check_select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    invalid_scores: Tensor | None,
    heads: int,
) -> None:
    check_tensor("scores", scores, _FLOATS, (None, None, None))
    batch, given, width = scores.shape
    check_tensor("num_pages", num_pages, _I32, (batch,), scores.device)
    if forced is not None:
        check_tensor("forced", forced, torch.bool, (batch, width), scores.device)
    if rest is not None:
        check_tensor("rest", rest, _F32, (batch, given), scores.device)
    if invalid_scores is not None:
        check_tensor("invalid_scores", invalid_scores, torch.int64, (1,), scores.device)
    if given == 0 or (given % heads and heads % given):
        raise KernelError(f"scores: got {given} heads, expected a multiple or a divisor of {heads}")
