"""Choosing pages on CUDA devices, in one launch where selections have a fixed length."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.cuda import from_triton
from hisparse.kernels.select_rule import SelectRule

__all__ = ["select"]


def select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    rule: SelectRule,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.select`; Triton and PyTorch serve ``mass`` and ``within``.

    A count of pages beyond the scores is taken as P, one below 0 as 0.
    """
    if rule.mass is not None or rule.within is not None:
        pages, lengths = from_triton.triton_ops().select(scores, num_pages, forced, rest, rule)
        return pages, lengths
    batch, heads = scores.shape[0], rule.heads
    pages = num_pages.new_empty(batch, heads, rule.max_pages)
    lengths = num_pages.new_empty(batch, heads)
    scratch_words = call_cuda("select_scratch_words", scores, heads)
    counter = rule.invalid_scores
    # Empty tensors stand for None.
    call_cuda(
        "select",
        scores,
        num_pages.contiguous(),
        num_pages.new_empty((0, 0), dtype=torch.bool) if forced is None else forced,
        num_pages.new_empty((0, 0), dtype=torch.float32) if rest is None else rest,
        pages,
        lengths,
        num_pages.new_empty(0, dtype=torch.int64) if counter is None else counter,
        num_pages.new_empty((batch, heads, scratch_words)),
        rule.drop_last,
    )
    return pages, lengths
