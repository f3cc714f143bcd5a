"""Attention over pages, and of a chunk of queries over contiguous keys."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg, Result, check_divides
from hisparse.kernels.operation import Operation
from hisparse.kernels.quantize.op import STORED, check_scales
from hisparse.types import UNSCALED, AttentionRule, PagedKV, StoredKV

__all__ = ["chunk_attention", "paged_attention"]


def _pages_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    check_scales("kv.scales", tensors["kv.k"], tensors["kv.scales"])
    check_divides("kv.k", sizes["Hr"], sizes["Q"])


def _keys_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    check_divides("k", sizes["Hkv"], sizes["Hq"])
    tokens, keys, first_key = sizes["T"], sizes["Tk"], sizes["first_key"]
    if sizes["causal"] and tokens != keys + first_key:
        raise KernelError(
            f"k: got {keys} keys, expected one for each of {tokens} queries and of {-first_key} "
            "tokens before them"
        )


PAGED_ATTENTION = Operation(
    __name__,
    "paged_attention",
    Arg("query", FLOATS, "R Q Dk", layout="all"),
    Arg("kv.k", STORED, "N Hr S Dk", layout="any"),
    Arg("kv.v", "kv.k", "N Hr S Dv", layout="any"),
    Arg("kv.scales", torch.uint8, "N Hr S 2", optional=True, layout="any"),
    Arg("page_table", torch.int32, "R P", layout="any"),
    Arg("seq_lens", torch.int32, "R", layout="any"),
    results=(Result("query", "R Q Dv"), Result("query", "R Q")),
    cpu=lambda call, query, kv, table, seq_lens, rule: call(
        scaled_query(query, rule.scale), *kv, table, seq_lens, rule.logit_cap, rule.window
    ),
    also=_pages_fit,
)
CHUNK_ATTENTION = Operation(
    __name__,
    "chunk_attention",
    Arg("query", FLOATS, "T Hq Dk", layout="all"),
    Arg("k", FLOATS, "Tk Hkv Dk", layout="any"),
    Arg("v", "k", "Tk Hkv Dv", layout="any"),
    results=(Result("query", "T Hq Dv"), Result("query", "T Hq")),
    values=("causal", "first_key"),
    cpu=lambda call, query, k, v, causal, rule, first_key: call(
        scaled_query(query, rule.scale), k, v, causal, rule.logit_cap, rule.window, first_key
    ),
    also=_keys_fit,
)


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

    Returns:
        out ``[R, Q, Dv]``, float32 or, on a GPU, in the query's dtype; and the natural log of the
        sum of exponentials of the logits ``[R, Q] float32``, -inf for a row without tokens. A
        float32 query is attended in float32 throughout.

    Raises:
        KernelError: a page is not in the pool.
    """
    stored = StoredKV(*kv)
    run = PAGED_ATTENTION(impl, query, *stored, page_table, seq_lens)
    out, lse = run(query, stored, page_table, seq_lens, rule)
    return out, lse


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

    Returns:
        out ``[T, Hq, Dv]``, float32 or, on a GPU, in the query's dtype; and the natural log of the
        sum of exponentials of the logits ``[T, Hq] float32``, -inf for a query without keys. A
        float32 query is attended in float32 throughout.
    """
    run = CHUNK_ATTENTION(impl, query, k, v, values=(causal, first_key if causal else 0))
    if rule.window and first_key > query.shape[0] - 1 - rule.window:
        # The last query attends key 0: the window hides nothing.
        rule = AttentionRule(rule.scale, rule.logit_cap)
    out, lse = run(query, k, v, causal, rule, first_key)
    return out, lse


def scaled_query(query: Tensor, scale: float) -> Tensor:
    """``query`` in float32, times ``scale``; the tensor itself if neither changes it."""
    return query.float() if scale == 1 else query.float() * scale
