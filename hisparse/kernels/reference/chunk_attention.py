"""Attention of a chunk of queries in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.reference.query import scaled_query

__all__ = ["chunk_attention"]

#: Queries per block, which limits the memory of the logits.
_QUERY_BLOCK = 512


def chunk_attention(
    query: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.chunk_attention`."""
    query = scaled_query(query, scale)
    tokens, num_keys = query.shape[0], k.shape[0]
    out = query.new_empty(*query.shape[:2], v.shape[-1])
    lse = query.new_empty(query.shape[:2])
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    position = torch.arange(num_keys, device=k.device)
    for start in range(0, tokens, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, tokens)
        seen = end if causal else num_keys
        queries = query[start:end].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        logits = queries @ keys[:, None, :, :seen]
        if causal:
            logits.masked_fill_(position[:end] > position[start:end, None], -torch.inf)
        block_lse = logits.logsumexp(-1)
        # Without keys lse is -inf, and -inf - -inf is NaN; the sum has no terms then.
        block = logits.sub_(block_lse[..., None]).exp_() @ values[:, None, :seen]
        out[start:end] = block.flatten(0, 1).transpose(0, 1)
        lse[start:end] = block_lse.flatten(0, 1).transpose(0, 1)
    return out, lse
