"""Attention of a chunk of queries over contiguous keys: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_divides, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.types import UNSCALED, AttentionRule

__all__ = ["chunk_attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def chunk_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    rule: AttentionRule = UNSCALED,
    first_key: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend many query tokens over contiguous keys.

    A prefill calls it once for the chunk itself and once for each tile of the prefix, and merges
    the parts by their log-sum-exp.

    Args:
        query: ``[T, Hq, Dk]`` float32, bfloat16 or float16; Hq is a multiple of Hkv, query heads
            of one KV head side by side.
        k: ``[Tk, Hkv, Dk]`` float32, bfloat16 or float16; any strides, but Dk dense.
        v: ``[Tk, Hkv, Dv]``, dtype and strides as for ``k``.
        causal: query t attends key j only if ``first_key + j <= t``, and the last query is the last
            key's; if False, every query attends all.
        rule: scale and cap, which are applied to the logits in float32, and window: query t attends
            key j only if ``first_key + j > t - window``.
        first_key: position of key 0 less the position of query 0; if ``causal``, T - Tk.
        impl: "auto", or an implementation's name.

    Returns:
        out ``[T, Hq, Dv]``, float32 or, on a GPU, in the query's dtype; and the natural log of the
        sum of exponentials of the logits ``[T, Hq] float32``, -inf for a query without keys. A
        float32 query is attended in float32 throughout.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check, query, k, v, values=(causal, first_key if causal else 0))
    if rule.window and first_key > query.shape[0] - 1 - rule.window:
        # The last query attends key 0: the window hides nothing.
        rule = AttentionRule(rule.scale, rule.logit_cap)
    module = implementation(impl, query.device, k.device)
    out, lse = module.chunk_attention(query, k, v, causal, rule, first_key)
    return out, lse


def _check(query: Tensor, k: Tensor, v: Tensor, causal: bool, first_key: int) -> None:
    check_tensor("query", query, _DTYPES, (None, None, None))
    (tokens, heads, width), device = query.shape, query.device
    check_tensor("k", k, _DTYPES, (None, None, width), device)
    check_tensor("v", v, k.dtype, (*k.shape[:2], None), device)
    check_divides("k", k.shape[1], heads)
    if causal and tokens != k.shape[0] + first_key:
        raise KernelError(
            f"k: got {k.shape[0]} keys, expected one for each of {tokens} queries and of "
            f"{-first_key} tokens before them"
        )
