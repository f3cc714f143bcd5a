"""Attention in C++, float32 accumulation."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu
from hisparse.kernels.reference.query import scaled_query
from hisparse.types import UNSCALED, AttentionRule, StoredKV

__all__ = ["chunk_attention", "paged_attention"]


def chunk_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    rule: AttentionRule = UNSCALED,
    first_key: int = 0,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.chunk_attention`."""
    query = scaled_query(query, rule.scale)
    out = query.new_empty(*query.shape[:2], v.shape[-1])
    lse = query.new_empty(query.shape[:2])
    how = (causal, rule.logit_cap, rule.window, first_key)
    call_cpu("chunk_attention", query.contiguous(), k, v, out, lse, *how)
    return out, lse


def paged_attention(
    query: Tensor,
    kv: StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    rule: AttentionRule = UNSCALED,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.paged_attention`."""
    query = scaled_query(query, rule.scale)
    out = query.new_empty(*query.shape[:2], kv.v.shape[-1])
    lse = query.new_empty(query.shape[:2])
    tensors = (query.contiguous(), kv.k, kv.v, kv.scales, page_table, seq_lens, out, lse)
    call_cpu("paged_attention", *tensors, rule.logit_cap, rule.window)
    return out, lse
