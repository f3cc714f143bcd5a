"""Attention over pages: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.quantize import QUANTIZED
from hisparse.types import UNSCALED, AttentionRule, PagedKV, StoredKV

__all__ = ["paged_attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(
    query: Tensor,
    kv: PagedKV | StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    rule: AttentionRule = UNSCALED,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend one query token per row over the pages of that row.

    Args:
        query: ``[R, Q, Dk]`` float32, bfloat16 or float16; Q is a multiple of Hr, query heads of
            one KV head side by side.
        kv: ``[N, Hr, S, D]`` pages; float8_e4m3fn or int8 if there are scales, else float32,
            bfloat16 or float16.
        page_table: ``[R, P] int32``, page ids; entries beyond ``seq_lens`` or before the window
            are not read.
        seq_lens: ``[R] int32``, tokens to attend; every page but the last one is full.
        rule: scale and cap, which are applied to the logits in float32, and window: a row attends
            only the last ``window`` of its tokens.
        impl: "auto", or an implementation's name.

    Returns:
        out ``[R, Q, Dv]``, float32 or, on a GPU, in the query's dtype; and the natural log of the
        sum of exponentials of the logits ``[R, Q] float32``, -inf for a row without tokens. A
        float32 query is attended in float32 throughout.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is not in the pool.
    """
    stored = StoredKV(*kv)
    check_once(_check, query, *stored.kv, stored.scales, page_table, seq_lens)
    module = implementation(impl, query.device, kv.k.device)
    out, lse = module.paged_attention(query, stored, page_table, seq_lens, rule)
    return out, lse


def _check(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
) -> None:
    check_tensor("query", query, _DTYPES, (None, None, None))
    (rows, queries, width), device = query.shape, query.device
    dtypes = _DTYPES if scales is None else QUANTIZED
    check_tensor("kv.k", k, dtypes, (None, None, None, width), device)
    check_tensor("kv.v", v, k.dtype, (*k.shape[:3], None), device)
    if scales is not None:
        check_tensor("kv.scales", scales, torch.uint8, (*k.shape[:3], 2), device)
    check_tensor("page_table", page_table, torch.int32, (rows, None), device)
    check_tensor("seq_lens", seq_lens, torch.int32, (rows,), device)
    heads = k.shape[1]
    if heads == 0 or queries % heads:
        raise KernelError(f"query: got {queries} heads, expected a multiple of the pages' {heads}")
