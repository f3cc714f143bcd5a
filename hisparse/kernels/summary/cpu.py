"""Summaries of pages, and scores by them, in C++; scores are rounded in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.attention.op import scaled_query
from hisparse.kernels.summary import reference
from hisparse.kernels.summary.op import PAGE_SCORE, PAGE_SUMMARY

__all__ = ["page_score", "page_summary"]


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
    PAGE_SUMMARY.on_cpu(keys, summaries.flatten(0, 1), host_pages, None)


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
    return PAGE_SCORE.on_cpu(query, summaries, host_page_table, num_pages, scales)[0]
