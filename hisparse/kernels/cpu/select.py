"""Summarising, scoring and choosing pages in C++; scores are rounded in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.kernels.reference import summary as reference
from hisparse.kernels.reference.query import scaled_query
from hisparse.kernels.select_rule import SelectRule

__all__ = ["page_score", "page_summary", "select"]


def page_summary(
    keys: Tensor, summaries: Tensor, host_pages: Tensor, scales: Tensor | None
) -> None:
    """See :func:`hisparse.kernels.page_summary`; PyTorch makes those in eight bits."""
    if scales is not None:
        reference.page_summary(keys, summaries, host_pages, scales)
        return
    ranges = summaries.shape[1]
    if ranges > 1:
        # The kernel treats each range as a separate page.
        keys = keys.unflatten(1, (ranges, -1)).flatten(0, 1)
        index = torch.arange(ranges, dtype=host_pages.dtype)
        host_pages = torch.add(index, host_pages[:, None], alpha=ranges).flatten()
    call_cpu("page_summary", dense_rows(keys), summaries.flatten(0, 1), dense_rows(host_pages))


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
    scale: float,
) -> Tensor:
    """See :func:`hisparse.kernels.page_score`."""
    query = scaled_query(query, scale)
    scores = query.new_empty(*query.shape[:2], host_page_table.shape[1])
    # An empty tensor stands for None.
    factors = query.new_empty(0, 0, 0) if scales is None else scales.contiguous()
    call_cpu(
        "page_score",
        query.contiguous(),
        summaries.contiguous(),
        factors,
        host_page_table,
        num_pages,
        scores,
    )
    return scores


def select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    rule: SelectRule,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.select`."""
    pages = num_pages.new_empty(scores.shape[0], rule.heads, rule.max_pages)
    lengths = num_pages.new_empty(scores.shape[0], rule.heads)
    # An empty tensor stands for None.
    beside = num_pages.new_empty(0, 0, dtype=torch.float32) if rest is None else rest.contiguous()
    always = num_pages.new_empty(0, 0, dtype=torch.bool) if forced is None else forced.contiguous()
    counter = rule.invalid_scores
    call_cpu(
        "select",
        scores.float().contiguous(),
        num_pages,
        always,
        beside,
        pages,
        lengths,
        num_pages.new_empty(0, dtype=torch.int64) if counter is None else counter,
        -1.0 if rule.mass is None else rule.mass,
        -1.0 if rule.within is None else rule.within,
        rule.drop_last,
    )
    return pages, lengths
