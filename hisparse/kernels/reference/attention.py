"""Attention over pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.reference.logits import cap_logits
from hisparse.kernels.reference.quantize import read_scales
from hisparse.kernels.reference.query import scaled_query
from hisparse.types import UNSCALED, AttentionRule, StoredKV

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    kv: StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    rule: AttentionRule = UNSCALED,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.paged_attention`."""
    query = scaled_query(query, rule.scale)
    rows, num_pages = page_table.shape
    heads, page_size = kv.k.shape[1:3]
    pages = page_table.clamp(min=0).flatten()
    k, v = (_gather(pages_kv, pages, rows).float() for pages_kv in kv.kv)
    if kv.scales is not None:
        scales = read_scales(_gather(kv.scales, pages, rows))
        k, v = k * scales[..., :1], v * scales[..., 1:]
    logits = cap_logits(query.unflatten(1, (heads, -1)) @ k.transpose(-1, -2), rule.logit_cap)
    token = torch.arange(num_pages * page_size, device=query.device)
    absent = token >= seq_lens[:, None]
    if rule.window:
        absent |= token < seq_lens[:, None] - rule.window
    logits.masked_fill_(absent[:, None, None], -torch.inf)
    # Values outside of what a row attends may be another request's, even NaN, and 0 * NaN is NaN.
    v.masked_fill_(absent[:, None, :, None], 0.0)
    lse = logits.logsumexp(-1)
    # A row without tokens has lse -inf; its weights have to be 0, not NaN.
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    out = logits.sub_(shift[..., None]).exp_() @ v
    return out.flatten(1, 2), lse.flatten(1, 2)


def _gather(pages_kv: Tensor, pages: Tensor, rows: int) -> Tensor:
    """``[N, Hr, S, D]`` at ``[R * P]`` -> ``[R, Hr, P * S, D]``."""
    taken = pages_kv.index_select(0, pages).unflatten(0, (rows, -1))
    tokens: Tensor = taken.transpose(1, 2).flatten(2, 3)
    return tokens
