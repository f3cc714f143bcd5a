"""Attention over pages in Triton: flash decoding, split over the tokens of a row.

A program is a block of the queries that share one KV head, and a split of the row's tokens. The
program of a block that ends last merges the splits by log-sum-exp: one launch.
https://arxiv.org/abs/2205.14135 has the idea.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.attention.triton_chunk import chunk_attention
from hisparse.kernels.attention.triton_splits import (
    arrival_counters,
    merge_last,
    merged_at_once,
    num_splits,
)
from hisparse.kernels.triton_common import (
    INTERPRETED,
    LARGEST_SHARED,
    cap_logits,
    rounded,
    shared_bytes,
)
from hisparse.types import UNSCALED, AttentionRule, StoredKV

__all__ = ["chunk_attention", "launch_options", "paged_attention"]

#: The smallest size that ``tl.dot`` accepts; queries of a group are padded to it.
_MIN_DOT = 16
_MAX_QUERIES = 32


def paged_attention(
    query: Tensor,
    kv: StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    rule: AttentionRule = UNSCALED,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.paged_attention`.

    ``out`` has the query's dtype. Calls share counters, so all calls on a device have to run on one
    stream, one after the other; a captured graph may replay on it.

    A query in 16 bits is multiplied as it is, and weights are rounded to the pages' dtype, as
    FlashAttention does. The kernel splits a number of a float32 query into three of the pages'
    dtype and a weight into two, which keeps all 24 bits and 16 bits of a float32.
    If values are the first columns of the keys (MLA: 512 of 576), the kernel reads keys once for
    both and rounds float32 queries too, because with so many queries per key arithmetic is the
    limit. It multiplies pages in eight bits as bfloat16, which is exact, and applies their scales
    to logits and weights.
    """
    rows, queries, width = query.shape
    heads, size = kv.k.shape[1:3]
    value_width = kv.v.shape[-1]
    group = queries // heads
    query_block = min(max(_MIN_DOT, triton.next_power_of_2(group)), _MAX_QUERIES)
    blocks = heads * triton.cdiv(group, query_block)
    members = min(triton.next_power_of_2(group), query_block)
    same_place = kv.v.data_ptr() == kv.k.data_ptr() and kv.v.stride() == kv.k.stride()
    shared = same_place and value_width < width
    first = value_width if shared else width
    token_bytes = kv.k.element_size() * (width if shared else width + value_width)
    splits = num_splits(
        query.device,
        rows * blocks,
        1 if first > 128 else 2,
        page_table.shape[1] * size,
        token_bytes / (4 * members * value_width),
    )
    out = query.new_empty(rows, queries, value_width)
    lse = query.new_empty(rows, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    shape = (rows, splits, queries) if splits > 1 else (0, 0, 0)
    partial = lse.new_empty(*shape, value_width)
    scaled, fp8 = kv.scales is not None, kv.k.dtype == torch.float8_e4m3fn
    # Read as bytes, because some GPUs that Triton compiles for do not have this format.
    k, v = (x.view(torch.uint8) if fp8 else x for x in kv.kv)
    scales = seq_lens if kv.scales is None else kv.scales
    dtype = torch.bfloat16 if scaled else kv.k.dtype
    value_block = max(_MIN_DOT, triton.next_power_of_2(value_width))
    _attend_kernel[(splits, blocks, rows)](
        query,
        k,
        v,
        scales,
        page_table,
        seq_lens,
        out,
        lse,
        partial,
        lse.new_empty(shape),
        arrival_counters(rows * blocks, query.device) if splits > 1 else seq_lens,
        rule.scale,
        *query.stride(),
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        *(scales.stride()[:3] if scaled else (0, 0, 0)),
        *page_table.stride(),
        queries,
        splits,
        GROUP=group,
        QUERIES=query_block,
        WIDTH=width,
        FIRST=first,
        FIRST_BLOCK=max(_MIN_DOT, triton.next_power_of_2(first)),
        REST_BLOCK=max(_MIN_DOT, triton.next_power_of_2(width - first)) if shared else 0,
        VALUE=value_width,
        VALUE_BLOCK=value_block,
        SAME=kv.v.stride() == kv.k.stride(),
        SIZE=size,
        EXACT=not shared and dtype != torch.float32 and query.dtype != dtype,
        SCALED=scaled,
        SPLIT=splits > 1,
        MEMBERS=members,
        MERGED=merged_at_once(members * value_block),
        LOGIT_CAP=float(rule.logit_cap),
        WINDOW=rule.window,
        **launch_options(first, kv.k.dtype, shared_bytes(query.device)),
    )
    return out, lse


def launch_options(
    width: int, dtype: torch.dtype, most_shared: int = LARGEST_SHARED
) -> dict[str, int]:
    """Tokens per loop step, warps and stages, chosen so that no kernel spills registers.

    With three stages, two steps of keys and values are in shared memory, one of them on its way.
    """
    if width > 128 and dtype == torch.float32:
        return {"TOKENS": 16, "num_warps": 8 if width <= 256 else 16, "num_stages": 2}
    if width > 256 and most_shared < LARGEST_SHARED:
        return {"TOKENS": 32, "num_warps": 8, "num_stages": 2}
    if width > 128:
        return {"TOKENS": 32, "num_warps": 8, "num_stages": 3}
    if dtype == torch.float32:
        return {"TOKENS": 16, "num_warps": 4, "num_stages": 3}
    return {"TOKENS": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _from_codes(x):
    """Convert int8, or e4m3 in bytes, to bfloat16, exactly; to float32 in the interpreter.

    The bits of e4m3 are those of a bfloat16 that is 2 ** -120 times the number, the difference of
    the exponents' biases.
    """
    if x.dtype == tl.int8:
        return x.to(tl.float32).to(tl.float32 if INTERPRETED else tl.bfloat16)
    # Sign, four zeros, exponent and mantissa, four zeros. Three of the zeros were signs.
    bits = (x.to(tl.int8, bitcast=True).to(tl.int16) << 4) & -0x7810
    if INTERPRETED:
        y = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True) * 2.0**120
    else:
        y = bits.to(tl.int16).to(tl.bfloat16, bitcast=True) * tl.full((1, 1), 2.0**120, tl.bfloat16)
    return y


@triton.jit
def _load_scale(place, live):
    """Load scales of tokens: the exponents of powers of two."""
    return (tl.load(place, mask=live, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_pages(entries, stride, token, start, end, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Load the pages of a step's tokens, which begin at ``start``: one where all are in one."""
    if SIZE % TOKENS == 0:
        pages = tl.load(entries + start // SIZE * stride, mask=start < end, other=0)
    else:
        pages = tl.load(entries + token // SIZE * stride, mask=token < end, other=0)
    return pages


@triton.jit
def _query_parts(q, narrow: tl.constexpr, kind: tl.constexpr, EXACT: tl.constexpr):
    """Numbers of ``narrow`` whose sum is ``q``: three if EXACT, or else one, which rounds it."""
    high = rounded(q, narrow)
    if EXACT:
        left = q - high.to(tl.float32)
        middle = rounded(left, narrow)
        low = rounded(left - middle.to(tl.float32), narrow)
        parts = (high.to(kind), middle.to(kind), low.to(kind))
    else:
        parts = (high.to(kind),)  # type: ignore[assignment]
    return parts


@triton.jit
def _load_tokens(
    source,  # [TOKENS], the first channel of each token
    live,  # [TOKENS]
    dim,  # [channels]
    COUNT: tl.constexpr,
    kind: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``[TOKENS, channels]``, keys or values; channels from COUNT on are 0."""
    seen = live[:, None] if dim.shape[0] == COUNT else live[:, None] & (dim < COUNT)[None, :]
    x = tl.load(source[:, None] + dim[None, :], mask=seen, other=0)
    return (_from_codes(x) if SCALED else x).to(kind)


@triton.jit
def _attend_kernel(
    query,  # [R, Q, Dk]
    keys,  # [N, Hr, S, Dk]
    values,  # [N, Hr, S, Dv]
    scales,  # [N, Hr, S, 2], if SCALED
    page_table,  # [R, P]
    seq_lens,  # [R]
    out,  # [R, Q, Dv]
    lse,  # [R, Q]
    partial,  # [R, splits, Q, Dv], if SPLIT
    lses,  # [R, splits, Q], if SPLIT
    arrivals,  # [R, blocks of queries], 0, if SPLIT
    scale,  # softmax scale
    query_row,
    query_head,
    query_dim,
    key_page,
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    scale_page,
    scale_head,
    scale_token,
    table_row,
    table_entry,
    queries,
    splits,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SAME: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXACT: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    MEMBERS: tl.constexpr,
    MERGED: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    head = (tl.program_id(1) // blocks).to(tl.int64)
    block = tl.program_id(1) % blocks * QUERIES
    member = block + tl.arange(0, QUERIES)
    asked = member < GROUP
    first, dim = tl.arange(0, FIRST_BLOCK), tl.arange(0, VALUE_BLOCK)
    narrow: tl.constexpr = tl.bfloat16 if SCALED else keys.dtype.element_ty
    kind: tl.constexpr = tl.float32 if INTERPRETED else narrow
    source = query + row * query_row + (head * GROUP + member)[:, None] * query_head
    seen_q = asked[:, None] & (first < FIRST)[None, :]
    q = tl.load(source + first[None, :] * query_dim, mask=seen_q, other=0.0).to(tl.float32)
    parts = _query_parts(q, narrow, kind, EXACT)
    if REST_BLOCK > 0:
        rest = tl.arange(0, REST_BLOCK)
        more = asked[:, None] & (rest < WIDTH - FIRST)[None, :]
        others = source + (FIRST + rest)[None, :] * query_dim
        q_rest = tl.load(others, mask=more, other=0.0).to(tl.float32)
        q_rest = rounded(q_rest, narrow).to(kind)
    length = tl.load(seq_lens + row)
    if WINDOW > 0:
        # Steps begin at multiples of TOKENS, so that a step's pages are whole.
        oldest = tl.maximum(length - WINDOW, 0)
        base = oldest // TOKENS * TOKENS
        share = tl.cdiv(tl.cdiv(length - base, splits), TOKENS) * TOKENS
        begin = base + split * share
    else:
        share = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
        begin = split * share
    end = tl.minimum(begin + share, length)
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    # Added up over the tokens of a step at the end: a sum over threads in each step costs barriers.
    totals = tl.zeros((QUERIES, TOKENS), tl.float32)
    acc = tl.zeros((QUERIES, VALUE_BLOCK), tl.float32)
    keys += head * key_head
    values += head * value_head
    entries = page_table + row * table_row
    token = begin + tl.arange(0, TOKENS)
    page = _load_pages(entries, table_entry, token, begin, end, SIZE, TOKENS)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        live = token < end
        if WINDOW > 0:
            live = live & (token >= oldest)
        # A token's place in its page. Where a step is whole pages, this is the same in all steps.
        inside = tl.arange(0, TOKENS) % SIZE if TOKENS % SIZE == 0 else token % SIZE
        at = page.to(tl.int64)
        # A step ahead: the keys' addresses are known before the step, so that they can be fetched
        # while the steps before it compute.
        page = _load_pages(entries, table_entry, token + TOKENS, start + TOKENS, end, SIZE, TOKENS)
        place = at * key_page + inside * key_token
        k = _load_tokens(keys + place, live, first, FIRST, kind, SCALED)
        logits = tl.dot(parts[0], tl.trans(k), input_precision="ieee")
        for part in tl.static_range(1, len(parts)):
            logits += tl.dot(parts[part], tl.trans(k), input_precision="ieee")
        if REST_BLOCK > 0:
            k_rest = _load_tokens(keys + place + FIRST, live, rest, WIDTH - FIRST, kind, False)
            logits += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
            v = k
        else:
            place = place if SAME else at * value_page + inside * value_token
            v = _load_tokens(values + place, live, dim, VALUE, kind, SCALED)
        logits *= scale
        if SCALED:
            spot = scales + at * scale_page + head * scale_head + inside * scale_token
            logits *= _load_scale(spot, live)[None, :]
        if LOGIT_CAP > 0:
            logits = cap_logits(logits, LOGIT_CAP)
        logits = tl.where(live[None, :], logits, -float("inf"))
        top = tl.maximum(highest, tl.max(logits, axis=1))
        weights = tl.exp(logits - top[:, None])
        shrink = tl.exp(highest - top)[:, None]
        totals = totals * shrink + weights
        if SCALED:
            weights *= _load_scale(spot + 1, live)[None, :]
        high = rounded(weights, narrow)
        acc = acc * shrink + tl.dot(high.to(kind), v, input_precision="ieee")
        if EXACT:
            low = rounded(weights - high.to(tl.float32), narrow)
            acc += tl.dot(low.to(kind), v, input_precision="ieee")
        highest = top
    total = tl.sum(totals, axis=1)
    # Without a token the sum is 0: the output is 0 and its log-sum-exp -inf.
    some = tl.where(total > 0, total, 1.0)
    acc = acc * tl.where(total > 0, 1.0 / some, 0.0)[:, None]
    summed = tl.where(total > 0, highest + tl.log(some), -float("inf"))
    shown = asked[:, None] & (dim < VALUE)[None, :]
    if SPLIT:
        target = (row * splits + split) * queries + head * GROUP + member
        tl.store(partial + target[:, None] * VALUE + dim[None, :], acc, mask=shown)
        tl.store(lses + target, summed, mask=asked)
        merge_last(
            (out, lse),
            (partial, lses),
            arrivals + row * tl.num_programs(1) + tl.program_id(1),
            (row, head * GROUP + block, GROUP - block),
            queries,
            splits,
            VALUE,
            VALUE_BLOCK,
            MEMBERS,
            MERGED,
        )
    else:
        target = row * queries + head * GROUP + member
        shaped = rounded(acc, out.dtype.element_ty)
        tl.store(out + target[:, None] * VALUE + dim[None, :], shaped, mask=shown)
        tl.store(lse + target, summed, mask=asked)
