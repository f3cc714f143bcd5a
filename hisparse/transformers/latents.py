"""Grouped-query attention written exactly as latent attention (MLA), so that its weights judge MLA.

A token's latent holds the values and then the keys of all heads, and a query is zero but for the
keys of its own head: scores and outputs are those of the model's own attention. As in MLA, one
selection serves all heads (TransMLA writes weights so, https://arxiv.org/abs/2502.07864).
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_latents(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``q [B, Hq, T, D]``, ``k [B, Hkv, T, D]``, ``v [B, Hkv, T, Dv]`` as those of latents.

    Returns:
        ``q [B, Hq, T, Hkv * (Dv + D)]``, ``k [B, 1, T, Hkv * (Dv + D)]``, and v, the first columns
        of k.
    """
    heads, values = k.shape[1], k.shape[1] * v.shape[-1]
    latents = torch.cat([x.transpose(1, 2).flatten(2) for x in (v, k)], -1)[:, None]
    queries = q.new_zeros(*q.shape[:-1], latents.shape[-1])
    by_head = queries[..., values:].unflatten(-1, (heads, -1)).unflatten(1, (heads, -1))
    own = by_head.diagonal(dim1=1, dim2=4)  # [B, Hq / Hkv, T, D, Hkv]
    own.copy_(q.unflatten(1, (heads, -1)).permute(0, 2, 3, 4, 1))
    return queries, latents, latents[..., :values]


def from_latents(out: Tensor, heads: int) -> Tensor:
    """``out [B, T, Hq, Hkv * Dv]`` of latents -> ``[B, T, Hq, Dv]``: each query's own values."""
    by_head = out.unflatten(-1, (heads, -1)).unflatten(2, (heads, -1))
    own: Tensor = by_head.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3).flatten(2, 3)
    return own
