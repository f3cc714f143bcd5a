"""Masked attention with log-sum-exp in PyTorch, one block of queries at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.kernels import cap_logits
from hisparse.types import AttentionRule

#: Queries per block, which limits the memory of the logits.
_QUERY_BLOCK = 512


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, hidden: Callable[[slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Masked attention with its log-sum-exp.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[Tk, Hkv, D]``.
        rule: scale and cap; ``hidden`` takes the place of a window.
        hidden: takes a slice of the T queries and returns their mask ``[t, Tk] bool``, True at
            keys that a query does not attend.

    Returns:
        out ``[T, Hq, Dv] float32``, lse ``[T, Hq] float32``; 0 and -inf for a query without keys.
    """
    kv_heads = k.shape[1]
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    outs, lses = [], []
    for start in range(0, q.shape[0], _QUERY_BLOCK):
        block = q[start : start + _QUERY_BLOCK].float()
        queries = block.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        logits = cap_logits((queries @ keys[:, None]) * rule.scale, rule.logit_cap)
        logits.masked_fill_(hidden(slice(start, start + block.shape[0])), -torch.inf)
        lse = logits.logsumexp(-1)
        # For a query without keys -inf - -inf is NaN; its weights must be 0.
        largest = lse.clamp(min=torch.finfo(lse.dtype).min)
        out = (logits - largest[..., None]).exp_() @ values[:, None]
        outs.append(out.flatten(0, 1).transpose(0, 1).contiguous())
        lses.append(lse.flatten(0, 1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def mask_all_but(chosen: Tensor, num_keys: int) -> Callable[[slice], Tensor]:
    """The argument ``hidden`` of :func:`attend_masked` for queries that attend only some keys.

    Args:
        chosen: ``[T, K]``, key indices per query; values outside 0 to ``num_keys - 1`` are padding.
        num_keys: Tk.
    """

    def hidden(queries: slice) -> Tensor:
        keys = chosen[queries].long()
        # Padding goes to one extra column, which the last line cuts off.
        keys = torch.where((keys >= 0) & (keys < num_keys), keys, num_keys)
        mask = torch.ones(len(keys), num_keys + 1, dtype=torch.bool, device=keys.device)
        return mask.scatter_(1, keys, False)[:, :num_keys]

    return hidden
