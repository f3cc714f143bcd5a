"""Attention of a chunk of queries over contiguous keys in Triton (FlashAttention).

A program is a block of the queries of one KV head: token by token, the heads of the group side by
side. So one kernel serves MHA, GQA and MLA. https://arxiv.org/abs/2205.14135 has the idea.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.attention.triton_splits import store_attended
from hisparse.kernels.triton_common import (
    INTERPRETED,
    LARGEST_SHARED,
    cap_logits,
    require_dense_rows,
    rounded,
    same_places,
    shared_bytes,
)
from hisparse.types import AttentionRule

#: The smallest size that ``tl.dot`` accepts.
_MIN_DOT = 16


def chunk_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    rule: AttentionRule,
    first_key: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.chunk_attention`.

    ``out`` has the query's dtype. A query in the 16 bits of keys and values is multiplied as it is,
    and weights are rounded to that dtype; any other combination is multiplied in float32. If values
    are the first columns of the keys (MLA: 512 of 576), the kernel reads keys once for both.
    """
    tokens, queries, width = query.shape
    require_dense_rows(k=k, v=v)
    (num_keys, heads), value_width = k.shape[:2], v.shape[-1]
    out = query.new_empty(tokens, queries, value_width)
    lse = query.new_empty(tokens, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    group = queries // heads
    same_place = v.data_ptr() == k.data_ptr() and same_places(k, v)
    shared = same_place and value_width < width
    first = value_width if shared else width
    narrow = query.dtype == k.dtype
    options = chunk_options(
        first, query.dtype if narrow else torch.float32, shared_bytes(query.device)
    )
    _chunk_kernel[(triton.cdiv(tokens * group, options["ROWS"]), heads)](
        (query, *query.stride()),
        (k, *k.stride()[:2]),
        (v, *v.stride()[:2]),
        (out, lse),
        rule.scale,
        first_key,
        tokens * group,
        num_keys,
        queries,
        GROUP=group,
        WIDTH=width,
        FIRST=first,
        FIRST_BLOCK=max(_MIN_DOT, triton.next_power_of_2(first)),
        REST_BLOCK=max(_MIN_DOT, triton.next_power_of_2(width - first)) if shared else 0,
        VALUE=value_width,
        VALUE_BLOCK=max(_MIN_DOT, triton.next_power_of_2(value_width)),
        CAUSAL=causal,
        NARROW=narrow,
        LOGIT_CAP=float(rule.logit_cap),
        WINDOW=rule.window,
        **options,
    )
    return out, lse


def chunk_options(
    width: int, dtype: torch.dtype, most_shared: int = LARGEST_SHARED
) -> dict[str, int]:
    """Queries of a program, keys per loop step, warps and stages: no kernel spills registers.

    Args:
        width: of the keys, or of the values that are a part of them.
        dtype: that is multiplied.
        most_shared: bytes of shared memory that a program may take.
    """
    if dtype == torch.float32 and width > 128:
        return {"ROWS": 16 if width > 256 else 32, "TOKENS": 16, "num_warps": 8, "num_stages": 1}
    if dtype == torch.float32:
        # Without maxnreg, ptxas would rather spill 8 bytes than run a block less at once.
        return {"ROWS": 32, "TOKENS": 16, "num_warps": 8, "num_stages": 2, "maxnreg": 128}
    stages = 3 if most_shared >= LARGEST_SHARED else 2
    if width > 256:
        return {"ROWS": 32, "TOKENS": 32, "num_warps": 8, "num_stages": stages}
    if width > 128:
        return {"ROWS": 64, "TOKENS": 32, "num_warps": 8, "num_stages": stages}
    return {"ROWS": 128, "TOKENS": 32, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["first_key"])
def _chunk_kernel(
    query,  # [T, Hq, Dk], and its strides
    keys,  # [Tk, Hkv, Dk], and its strides of tokens and heads
    values,  # [Tk, Hkv, Dv], and its strides of tokens and heads
    results,  # out [T, Hq, Dv] and lse [T, Hq]
    scale,  # softmax scale
    first_key,  # position of key 0 less that of query 0; read if CAUSAL or WINDOW
    count,  # queries of a KV head: tokens * GROUP
    num_keys,
    queries,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    query_data, query_token, query_head, query_dim = query
    key_data, key_token, key_head = keys
    value_data, value_token, value_head = values
    # Blocks that attend the most keys come first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    asked = row < count
    at, member = (row // GROUP).to(tl.int64), head * GROUP + row % GROUP
    first, dim = tl.arange(0, FIRST_BLOCK), tl.arange(0, VALUE_BLOCK)
    narrow: tl.constexpr = key_data.dtype.element_ty if NARROW else tl.float32
    kind: tl.constexpr = tl.float32 if INTERPRETED else narrow
    source = query_data + (at * query_token + member * query_head)[:, None]
    seen_q = asked[:, None] & (first < FIRST)[None, :]
    q = tl.load(source + first[None, :] * query_dim, mask=seen_q, other=0.0).to(kind)
    if REST_BLOCK > 0:
        rest = FIRST + tl.arange(0, REST_BLOCK)
        more = asked[:, None] & (rest < WIDTH)[None, :]
        q_rest = tl.load(source + rest[None, :] * query_dim, mask=more, other=0.0).to(kind)
    key_data += head * key_head
    value_data += head * value_head
    end = num_keys
    if CAUSAL:
        end = tl.minimum((block * ROWS + ROWS - 1) // GROUP + 1 - first_key, num_keys)
    begin = 0
    if WINDOW > 0:
        # Keys that the block's first query no longer attends.
        hidden = tl.maximum(block * ROWS // GROUP - WINDOW + 1 - first_key, 0)
        begin = hidden // TOKENS * TOKENS
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_BLOCK), tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        live = token < end
        place = token.to(tl.int64) * key_token
        seen = live[:, None] if FIRST == FIRST_BLOCK else live[:, None] & (first < FIRST)[None, :]
        k = tl.load(key_data + (place[:, None] + first[None, :]), mask=seen, other=0.0).to(kind)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST_BLOCK > 0:
            seen = live[:, None] & (rest < WIDTH)[None, :]
            k_rest = tl.load(key_data + (place[:, None] + rest[None, :]), mask=seen, other=0.0)
            logits += tl.dot(q_rest, tl.trans(k_rest.to(kind)), input_precision="ieee")
            v = k
        else:
            place = token.to(tl.int64) * value_token
            seen = live[:, None] if VALUE == VALUE_BLOCK else live[:, None] & (dim < VALUE)[None, :]
            v = tl.load(value_data + (place[:, None] + dim[None, :]), mask=seen, other=0.0).to(kind)
        visible = live[None, :]
        if CAUSAL:
            visible = visible & (first_key + token[None, :] <= at[:, None])
        if WINDOW > 0:
            visible = visible & (first_key + token[None, :] > at[:, None] - WINDOW)
        logits *= scale
        if LOGIT_CAP > 0:
            logits = cap_logits(logits, LOGIT_CAP)
        logits = tl.where(visible, logits, -float("inf"))
        top = tl.maximum(highest, tl.max(logits, axis=1))
        # Without a window every query attends key 0: its largest logit is a number from the first
        # step on.
        shift = tl.where(top == -float("inf"), 0.0, top) if WINDOW > 0 else top
        weights = tl.exp(logits - shift[:, None])
        shrink = tl.exp(highest - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        weights = rounded(weights, narrow).to(kind)
        acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        highest = top
    # Without keys the sum is 0: the output is 0 and its log-sum-exp -inf.
    some = tl.where(total > 0, total, 1.0)
    summed = tl.where(total > 0, highest + tl.log(some), -float("inf"))
    store_attended(results, at * queries + member, acc / some[:, None], summed, asked, VALUE)
