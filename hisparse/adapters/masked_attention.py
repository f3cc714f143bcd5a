"""Attention of many queries, each over some of the keys, in PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["attend_masked", "mask_all_but"]

#: Queries at a time: bounds the logits in memory.
_QUERY_BLOCK = 512


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Callable[[slice], Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Attention with the log-sum-exp, a block of queries at a time.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[Tk, Hkv, D]``.
        scale: softmax scale.
        hidden: for a slice of the T queries, keys that they do not see, ``[t, Tk] bool``; None
            where they see all.

    Returns:
        out ``[T, Hq, Dv] float32``, lse ``[T, Hq] float32``; of a query that sees nothing 0 and
        -inf.
    """
    kv_heads = k.shape[1]
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    outs, lses = [], []
    for start in range(0, q.shape[0], _QUERY_BLOCK):
        block = q[start : start + _QUERY_BLOCK].float()
        queries = block.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        logits = (queries @ keys[:, None]) * scale
        unseen = hidden(slice(start, start + block.shape[0]))
        if unseen is not None:
            logits.masked_fill_(unseen, -torch.inf)
        lse = logits.logsumexp(-1)
        # Where nothing is seen -inf - -inf would make the weights NaN: they are to be 0.
        largest = lse.clamp(min=torch.finfo(lse.dtype).min)
        out = (logits - largest[..., None]).exp_() @ values[:, None]
        outs.append(out.flatten(0, 1).transpose(0, 1).contiguous())
        lses.append(lse.flatten(0, 1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def mask_all_but(chosen: Tensor, num_keys: int) -> Callable[[slice], Tensor]:
    """The ``hidden`` of :func:`attend_masked` for queries that see keys ``chosen [T, K]`` alone.

    What is not in 0 to ``num_keys - 1`` is no key.
    """

    def hidden(own: slice) -> Tensor:
        keys = chosen[own].long()
        # What is no key goes to a column that is then cut off.
        keys = torch.where((keys >= 0) & (keys < num_keys), keys, num_keys)
        mask = torch.ones(len(keys), num_keys + 1, dtype=torch.bool, device=keys.device)
        return mask.scatter_(1, keys, False)[:, :num_keys]

    return hidden
