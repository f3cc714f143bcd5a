"""Attention over pages in C++: float32 accumulation, split over the pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import reference_attention
from hisparse.kernels._build import cpu_library
from hisparse.types import PagedKV

__all__ = ["paged_attention"]

_library: Any = cpu_library()

#: Tokens of one split: enough work for a thread that has to be woken.
_SPLIT_TOKENS = 2048


def paged_attention(
    query: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.paged_attention`."""
    if kv.k.dtype not in (torch.float32, torch.bfloat16):
        return reference_attention.paged_attention(query, kv, page_table, seq_lens)
    rows, queries, _ = query.shape
    pages_per_split = max(1, _SPLIT_TOKENS // kv.k.shape[2])
    splits = max(1, -(-page_table.shape[1] // pages_per_split))
    out = query.new_empty(rows, splits, queries, kv.v.shape[-1])
    lse = query.new_empty(rows, splits, queries)
    try:
        _library.paged_attention(
            query.contiguous(), kv.k, kv.v, page_table, seq_lens, out, lse, pages_per_split
        )
    except ValueError as error:
        raise KernelError(str(error)) from None
    if splits == 1:
        return out[:, 0], lse[:, 0]
    total = lse.logsumexp(1)
    weights = (lse - total.masked_fill(total == -torch.inf, 0.0)[:, None]).exp()
    return (out * weights[..., None]).sum(1), total
