"""Inputs and scores of Hugging Face's lightning indexer, which returns only its choice."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Indexer,
    apply_rotary_pos_emb,
)

from hisparse.types import IndexerInputs


def inputs_of(indexer: DeepseekV32Indexer, given: tuple[Tensor, ...]) -> IndexerInputs:
    """Of the one sequence for which ``indexer`` was called with ``given``."""
    hidden, q_resid, (cos, sin), *_ = given
    rope = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1))
    k = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    turned = apply_rotary_pos_emb(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    q, k = (torch.cat([new, x[..., rope:]], -1)[0] for new, x in zip(turned, (q, k), strict=True))
    weights = indexer.weights_proj(hidden)[0] * (indexer.n_heads * indexer.head_dim) ** -0.5
    return IndexerInputs(q, k[:, 0], weights)


def scores_of(inputs: IndexerInputs) -> Tensor:
    """``[n, n]`` in float64, -inf where a query does not see a key."""
    q, k, w = (x.double() for x in inputs)
    scores = torch.einsum("th,ths->ts", w, torch.einsum("thd,sd->ths", q, k).relu())
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
