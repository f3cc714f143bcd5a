"""Attention sinks: a learned logit for each query head that takes a share of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.adapters.base import Attended


def add_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """Let a logit without a value join the softmax, as in gpt-oss.

    Call it once for each layer and query, after all parts are merged: a sink belongs to the whole
    softmax. Sinks are not scaled and not capped. https://arxiv.org/abs/2508.10925

    Args:
        attended: attention over all keys.
        sinks: logits, any floating dtype, that broadcast to ``attended.lse``: ``[Hq]`` for
            ``lse [..., Hq]``.

    Returns:
        out ``[..., Dv]`` in the dtype of ``attended.out``, scaled by the share of the keys, and lse
        with the sinks; 0 and the sinks for a query without keys.
    """
    sinks = sinks.float()
    share = torch.sigmoid(attended.lse - sinks)[..., None]
    out = (attended.out * share).to(attended.out.dtype)
    return Attended(out, torch.logaddexp(attended.lse, sinks))
