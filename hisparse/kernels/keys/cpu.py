"""Exact logits of keys in C++; sums are in another order than PyTorch's."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.keys.op import KEY_SCORE

__all__ = ["key_score"]


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    reduce: str,
    logit_cap: float,
) -> Tensor:
    """See :func:`hisparse.kernels.key_score`."""
    more = (reduce == "lse", logit_cap)
    return KEY_SCORE.on_cpu(query, keys, host_page_table, num_pages, more=more)[0]
