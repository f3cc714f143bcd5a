"""Attention over pages: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.types import PagedKV, StoredKV

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    kv: PagedKV | StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One query token per row over the pages of that row; float32 throughout.

    Args:
        query: ``[R, Q, Dk] float32``, times the softmax scale; Q is a multiple of Hr, query heads
            of one KV head side by side.
        kv: ``[N, Hr, S, D]`` pages; with scales they are float8_e4m3fn, else any floats.
        page_table: ``[R, P] int32``, page ids; entries beyond ``seq_lens`` are not read.
        seq_lens: ``[R] int32``, tokens to attend: all pages are full but the last one.
        impl: implementation.

    Returns:
        out ``[R, Q, Dv] float32``, and the natural log of the sum of exponentials of the logits
        ``[R, Q] float32``, -inf for a row without tokens.
    """
    rows, queries, width = query.shape
    heads = kv.k.shape[1]
    check_tensor("query", query, torch.float32, (None, None, None))
    check_tensor("kv.k", kv.k, kv.v.dtype, (None, None, None, width))
    check_tensor("kv.v", kv.v, kv.k.dtype, (*kv.k.shape[:3], None))
    check_tensor("page_table", page_table, torch.int32, (rows, None))
    check_tensor("seq_lens", seq_lens, torch.int32, (rows,))
    if queries % heads:
        raise KernelError(f"query: got {queries} heads, expected a multiple of the pages' {heads}")
    stored = StoredKV(*kv)
    if stored.scales is not None:
        check_tensor("kv.k", kv.k, torch.float8_e4m3fn, kv.k.shape)
        check_tensor("kv.scales", stored.scales, torch.uint8, (*kv.k.shape[:3], 2), kv.k.device)
    module = implementation(impl, query.device, kv.k.device)
    out, lse = module.paged_attention(query, stored, page_table, seq_lens)
    return out, lse
