"""Attention of a chunk of queries over contiguous keys in Triton (FlashAttention).

A program is a block of the queries of one KV head: token by token, the heads of the group side by
side. So one kernel serves MHA, GQA and MLA. https://arxiv.org/abs/2205.14135 has the idea.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.attention.triton_splits import store_attended
from hisparse.kernels.triton_common import (
    INTERPRETED,
    LARGEST_SHARED,
    cap_logits,
    key_blocks,
    require_dense_rows,
    rounded,
    shared_bytes,
)
from hisparse.types import AttentionRule


class _ChunkConstants(NamedTuple):
    """What the kernel is compiled for; ``*_block`` are sizes rounded up to a power of two."""

    group: int  # query heads of a KV head
    width: int  # Dk, of a key
    first: int  # channels of a key that are read at once: all, or those that are the value too
    first_block: int  # the same, as a block
    rest_block: int  # the channels after them; 0: there are none
    value_width: int  # Dv, of a value
    value_block: int  # the same, as a block
    causal: bool  # whether a query attends no key after its own position
    narrow: bool  # whether products are in the keys' dtype, else in float32
    rows: int  # queries of a program
    tokens: int  # of a step of the loop
    logit_cap: float  # see :class:`hisparse.types.AttentionRule`; 0: none
    window: int  # tokens of the rule's window; 0: none


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
    tokens, queries, _ = query.shape
    require_dense_rows(k=k, v=v)
    num_keys, heads = k.shape[:2]
    out = query.new_empty(tokens, queries, v.shape[-1])
    lse = query.new_empty(tokens, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    group, blocks = queries // heads, key_blocks(k, v)
    narrow = query.dtype == k.dtype
    (block, step), options = chunk_options(
        blocks["first"], query.dtype if narrow else torch.float32, shared_bytes(query.device)
    )
    if rule.logit_cap and narrow:
        # As in `paged_attention`.
        options.setdefault("maxnreg", 255)
    _chunk_kernel[(triton.cdiv(tokens * group, block), heads)](
        (query, *query.stride()),
        (k, *k.stride()[:2]),
        (v, *v.stride()[:2]),
        (out, lse),
        rule.scale,
        first_key,
        (tokens * group, num_keys, queries),
        _ChunkConstants(
            group=group,
            **blocks,
            causal=causal,
            narrow=narrow,
            rows=block,
            tokens=step,
            logit_cap=float(rule.logit_cap),
            window=rule.window,
        ),
        **options,
    )
    return out, lse


def chunk_options(
    width: int, dtype: torch.dtype, most_shared: int = LARGEST_SHARED
) -> tuple[tuple[int, int], dict[str, int]]:
    """Queries of a program and keys per loop step; warps and stages: no kernel spills registers.

    Args:
        width: of the keys, or of the values that are a part of them.
        dtype: that is multiplied.
        most_shared: bytes of shared memory that a program may take.
    """
    if dtype == torch.float32 and width > 128:
        return (16 if width > 256 else 32, 16), {"num_warps": 8, "num_stages": 1}
    if dtype == torch.float32:
        # Without maxnreg, ptxas would rather spill 8 bytes than run a block less at once.
        return (32, 16), {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
    stages = 3 if most_shared >= LARGEST_SHARED else 2
    if width > 256:
        return (32, 32), {"num_warps": 8, "num_stages": stages}
    if width > 128:
        return (64, 32), {"num_warps": 8, "num_stages": stages, "maxnreg": 255}
    return (128, 32), {"num_warps": 8, "num_stages": 3}


@triton.jit
def _load_queries(query, at, head, asked, kind: tl.constexpr, const: tl.constexpr):
    """The first channels of queries, and those after them."""
    data, stride_token, stride_head, stride_dim = query
    source = (data + (at * stride_token + head * stride_head))[:, None]
    first = tl.arange(0, const.first_block)[None, :]
    seen = asked[:, None] & (first < const.first)
    q = tl.load(source + first * stride_dim, mask=seen, other=0.0).to(kind)
    q_rest = q
    if const.rest_block > 0:
        rest = const.first + tl.arange(0, const.rest_block)[None, :]
        seen = asked[:, None] & (rest < const.width)
        q_rest = tl.load(source + rest * stride_dim, mask=seen, other=0.0).to(kind)
    return q, q_rest


@triton.jit
def _load_tokens(
    source, live, start: tl.constexpr, end: tl.constexpr, channels, kind: tl.constexpr
):
    """``[tokens, channels]`` from channel ``start`` on; those from ``end`` on are 0."""
    dim = start + channels
    whole: tl.constexpr = start + channels.shape[0] == end
    seen = live[:, None] if whole else live[:, None] & (dim < end)[None, :]
    return tl.load(source[:, None] + dim[None, :], mask=seen, other=0.0).to(kind)


@triton.jit
def _load_step(queries, keys, values, token, live, const: tl.constexpr):
    """q.k of a step's tokens, ``[rows, tokens]``, and their values, ``[tokens, channels]``."""
    q, q_rest = queries
    key_data, key_token = keys
    kind: tl.constexpr = q.dtype
    source = key_data + token.to(tl.int64) * key_token
    k = _load_tokens(source, live, 0, const.first, tl.arange(0, const.first_block), kind)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if const.rest_block > 0:
        rest = tl.arange(0, const.rest_block)
        k_rest = _load_tokens(source, live, const.first, const.width, rest, kind)
        logits += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        v = k
    else:
        value_data, value_token = values
        source = value_data + token.to(tl.int64) * value_token
        v = _load_tokens(source, live, 0, const.value_width, tl.arange(0, const.value_block), kind)
    return logits, v


@triton.jit
def _range_of_keys(block, first_key, num_keys, const: tl.constexpr):
    """The first key that a block of queries reads, and the one after the last."""
    begin, end = 0, num_keys
    if const.causal:
        last = (block * const.rows + const.rows - 1) // const.group
        end = tl.minimum(last + 1 - first_key, num_keys)
    if const.window > 0:
        # Keys that the block's first query no longer attends.
        oldest = block * const.rows // const.group - const.window + 1
        begin = tl.maximum(oldest - first_key, 0) // const.tokens * const.tokens
    return begin, end


@triton.jit(do_not_specialize=["first_key"])
def _chunk_kernel(
    query,  # [T, Hq, Dk], and its strides
    keys,  # [Tk, Hkv, Dk], and its strides of tokens and heads
    values,  # [Tk, Hkv, Dv], and its strides of tokens and heads
    results,  # out [T, Hq, Dv] and lse [T, Hq]
    scale,  # softmax scale
    first_key,  # position of key 0 less that of query 0; read if causal or in a window
    shape,  # T * group, Tk, Hq
    const: tl.constexpr,
):
    key_data, key_token, key_head = keys
    value_data, value_token, value_head = values
    count, num_keys, queries = shape
    ROWS: tl.constexpr = const.rows
    VALUE_BLOCK: tl.constexpr = const.value_block
    # Blocks that attend the most keys come first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    asked = row < count
    at, member = (row // const.group).to(tl.int64), head * const.group + row % const.group
    narrow: tl.constexpr = key_data.dtype.element_ty if const.narrow else tl.float32
    kind: tl.constexpr = tl.float32 if INTERPRETED else narrow
    q = _load_queries(query, at, member, asked, kind, const)
    keys_of = (key_data + head * key_head, key_token)
    values_of = (value_data + head * value_head, value_token)
    begin, end = _range_of_keys(block, first_key, num_keys, const)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_BLOCK), tl.float32)
    for start in range(begin, end, const.tokens):
        token = start + tl.arange(0, const.tokens)
        live = token < end
        logits, v = _load_step(q, keys_of, values_of, token, live, const)
        visible = live[None, :]
        if const.causal:
            visible = visible & (first_key + token[None, :] <= at[:, None])
        if const.window > 0:
            visible = visible & (first_key + token[None, :] > at[:, None] - const.window)
        logits *= scale
        if const.logit_cap > 0:
            logits = cap_logits(logits, const.logit_cap)
        logits = tl.where(visible, logits, -float("inf"))
        top = tl.maximum(highest, tl.max(logits, axis=1))
        # Without a window every query attends key 0: its largest logit is a number from the first
        # step on.
        shift = tl.where(top == -float("inf"), 0.0, top) if const.window > 0 else top
        weights, shrink = tl.exp(logits - shift[:, None]), tl.exp(highest - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        weights = rounded(weights, narrow).to(kind)
        acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        highest = top
    # Without keys the sum is 0: the output is 0 and its log-sum-exp -inf.
    some = tl.where(total > 0, total, 1.0)
    summed = tl.where(total > 0, highest + tl.log(some), -float("inf"))
    place = at * queries + member
    store_attended(results, place, acc / some[:, None], summed, asked, const.value_width)
