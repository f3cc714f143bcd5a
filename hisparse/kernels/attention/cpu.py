"""Attention in C++, float32 accumulation."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.attention.op import CHUNK_ATTENTION, PAGED_ATTENTION, scaled_query
from hisparse.types import UNSCALED, AttentionRule, StoredKV

__all__ = ["chunk_attention", "paged_attention"]


def chunk_attention(
    query: Tensor, k: Tensor, v: Tensor, causal: bool, rule: AttentionRule, first_key: int
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.chunk_attention`."""
    query = scaled_query(query, rule.scale)
    more = (causal, rule.logit_cap, rule.window, first_key)
    return CHUNK_ATTENTION.on_cpu(query, k, v, more=more)


def paged_attention(
    query: Tensor,
    kv: StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    rule: AttentionRule = UNSCALED,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.paged_attention`."""
    query = scaled_query(query, rule.scale)
    more = (rule.logit_cap, rule.window)
    return PAGED_ATTENTION.on_cpu(query, *kv, page_table, seq_lens, more=more)
