"""Exact logits of pages in C++; sums are in another order than PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows

__all__ = ["key_score"]


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    pages: Tensor | None,
    reduce: str,
    logit_cap: float = 0.0,
) -> Tensor:
    """See :func:`hisparse.kernels.key_score`."""
    scores = query.new_empty(*query.shape[:2], host_page_table.shape[1])
    # An empty tensor stands for None.
    wanted = query.new_empty(0, dtype=torch.uint8)
    if pages is not None:
        wanted = pages.contiguous().view(torch.uint8)
    call_cpu(
        "key_score",
        query.contiguous(),
        keys,
        dense_rows(host_page_table),
        num_pages.contiguous(),
        wanted,
        scores,
        reduce == "lse",
        logit_cap,
    )
    return scores
