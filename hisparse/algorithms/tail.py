"""Logits of the tail page, for algorithms that need their maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.algorithms.step import DecodeStep


def tail_logits(query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
    """Logits of the tokens in the tail pages.

    Args:
        query: ``[B, Hq, D]``, times the softmax scale.
        layer_id: layer number.
        step: the step.

    Returns:
        ``[B, Hq, S] float32``, -inf after the first ``step.tail_lens`` tokens.
    """
    keys = step.tail_keys(layer_id).permute(0, 2, 3, 1).float()
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys).flatten(1, 2)
    token = torch.arange(logits.shape[-1], device=logits.device)
    absent = token >= step.tail_lens[:, None, None]
    seen: Tensor = logits.masked_fill(absent, -torch.inf)
    return seen
