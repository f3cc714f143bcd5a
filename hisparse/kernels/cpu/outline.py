"""Scores of outlines in C++, summed in another order."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows

__all__ = ["outline_score"]


def outline_score(
    query: Tensor, outlines: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.outline_score`."""
    scores = query.new_empty(*query.shape[:2], host_page_table.shape[1])
    call_cpu(
        "outline_score",
        query.contiguous(),
        outlines.contiguous(),
        dense_rows(host_page_table),
        num_pages.contiguous(),
        scores,
    )
    return scores
