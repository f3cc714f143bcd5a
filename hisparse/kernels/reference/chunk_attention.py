"""Attention of a chunk of queries in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.reference.logits import cap_logits
from hisparse.kernels.reference.query import scaled_query
from hisparse.types import UNSCALED, AttentionRule

__all__ = ["chunk_attention"]

#: Queries per block, which limits the memory of the logits.
_QUERY_BLOCK = 512


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
    tokens, num_keys = query.shape[0], k.shape[0]
    out = query.new_empty(*query.shape[:2], v.shape[-1])
    lse = query.new_empty(query.shape[:2])
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    # By its distance from query 0, as the queries' own positions.
    position = torch.arange(first_key, first_key + num_keys, device=k.device)
    for start in range(0, tokens, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, tokens)
        own = torch.arange(start, end, device=k.device)[:, None]
        # Keys that no query of the block attends are left out.
        oldest = max(0, start - rule.window + 1 - first_key) if rule.window else 0
        seen = slice(oldest, end - first_key if causal else num_keys)
        queries = query[start:end].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        logits = cap_logits(queries @ keys[:, None, :, seen], rule.logit_cap)
        if causal:
            logits.masked_fill_(position[seen] > own, -torch.inf)
        if rule.window:
            logits.masked_fill_(position[seen] <= own - rule.window, -torch.inf)
        block_lse = logits.logsumexp(-1)
        # A query without keys has lse -inf; its weights have to be 0, not NaN.
        shift = block_lse.masked_fill(block_lse == -torch.inf, 0.0)
        block = logits.sub_(shift[..., None]).exp_() @ values[:, None, seen]
        out[start:end] = block.flatten(0, 1).transpose(0, 1)
        lse[start:end] = block_lse.flatten(0, 1).transpose(0, 1)
    return out, lse
