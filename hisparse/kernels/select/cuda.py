"""Choosing pages on CUDA devices, in one launch where selections have a fixed length."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.select.op import SELECT, SelectRule

__all__ = ["select"]


def select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    invalid_scores: Tensor | None,
    rule: SelectRule,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.select`; Triton and PyTorch serve ``mass`` and ``within``.

    A count of pages beyond the scores is taken as P, one below 0 as 0.
    """
    tensors = (scores, num_pages, forced, rest, invalid_scores)
    if rule.mass is not None or rule.within is not None:
        pages, lengths = SELECT.function("triton")(*tensors, rule)
        return pages, lengths
    words = call_cuda("select_scratch_words", scores, rule.heads)
    scratch = num_pages.new_empty((scores.shape[0], rule.heads, words))
    more = (scratch, rule.drop_last)
    return SELECT.on_cuda(*tensors, more=more, H=rule.heads, K=rule.max_pages)
