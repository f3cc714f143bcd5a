"""Attention over pages in Triton: flash decoding, split over the tokens of a row.

A program is a block of the queries that share one KV head, and a split of the row's tokens. The
program of a block that ends last merges the splits by log-sum-exp: one launch.
https://arxiv.org/abs/2205.14135 has the idea.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.attention.triton_chunk import chunk_attention as chunk_attention
from hisparse.kernels.attention.triton_splits import (
    arrival_counters,
    merge_last,
    merged_at_once,
    num_splits,
    store_attended,
)
from hisparse.kernels.triton_common import (
    INTERPRETED,
    LARGEST_SHARED,
    cap_logits,
    require_dense_rows,
    rounded,
    same_places,
    shared_bytes,
)
from hisparse.types import AttentionRule, StoredKV

#: The smallest size that ``tl.dot`` accepts; queries of a group are padded to it.
_MIN_DOT = 16
_MAX_QUERIES = 32


def paged_attention(
    query: Tensor,
    kv: StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    rule: AttentionRule,
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
    rows, queries, _ = query.shape
    require_dense_rows(k=kv.k, v=kv.v, scales=kv.scales)
    seq_lens, sizes = seq_lens.contiguous(), _sizes(query, kv)
    heads, value = kv.k.shape[1], sizes["VALUE"]
    blocks = heads * triton.cdiv(sizes["GROUP"], sizes["QUERIES"])
    splits = num_splits(
        query.device,
        rows * blocks,
        1 if sizes["FIRST"] > 128 else 2,
        page_table.shape[1] * sizes["SIZE"],
        _token_bytes(kv, sizes) / (4 * sizes["MEMBERS"] * value),
    )
    out = query.new_empty(rows, queries, value)
    lse = query.new_empty(rows, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    shape = (rows, splits, queries) if splits > 1 else (0, 0, 0)
    partials = (lse.new_empty(*shape, value), lse.new_empty(shape))
    k, v = map(_readable, kv.kv)
    # Where there are no scales, none are read.
    scales = (seq_lens, 0, 0, 0) if kv.scales is None else (kv.scales, *kv.scales.stride()[:3])
    _attend_kernel[(splits, blocks, rows)](
        (query, *query.stride()),
        (k, *k.stride()[:3]),
        (v, *v.stride()[:3]),
        scales,
        (page_table, *page_table.stride()),
        seq_lens,
        (out, lse),
        partials,
        arrival_counters(rows * blocks, query.device) if splits > 1 else seq_lens,
        rule.scale,
        queries,
        splits,
        SPLIT=splits > 1,
        LOGIT_CAP=float(rule.logit_cap),
        WINDOW=rule.window,
        **sizes,
        **launch_options(sizes["FIRST"], kv.k.dtype, shared_bytes(query.device)),
    )
    return out, lse


def _sizes(query: Tensor, kv: StoredKV) -> dict[str, int]:
    """Constants that follow from tensors."""
    queries, width = query.shape[1:]
    heads, size = kv.k.shape[1:3]
    value = kv.v.shape[-1]
    same = same_places(kv.k, kv.v)
    # Values are the first columns of keys: these are read once.
    shared = same and kv.v.data_ptr() == kv.k.data_ptr() and value < width
    group, first = queries // heads, value if shared else width
    query_block = min(max(_MIN_DOT, triton.next_power_of_2(group)), _MAX_QUERIES)
    members = min(triton.next_power_of_2(group), query_block)
    value_block = max(_MIN_DOT, triton.next_power_of_2(value))
    dtype = kv.k.dtype if kv.scales is None else torch.bfloat16
    return {
        "GROUP": group,
        "QUERIES": query_block,
        "WIDTH": width,
        "FIRST": first,
        "FIRST_BLOCK": max(_MIN_DOT, triton.next_power_of_2(first)),
        "REST_BLOCK": max(_MIN_DOT, triton.next_power_of_2(width - first)) if shared else 0,
        "VALUE": value,
        "VALUE_BLOCK": value_block,
        "SAME": same,
        "SIZE": size,
        "EXACT": not shared and dtype != torch.float32 and query.dtype != dtype,
        "SCALED": kv.scales is not None,
        "MEMBERS": members,
        "MERGED": merged_at_once(members * value_block),
    }


def _readable(x: Tensor) -> Tensor:
    """Bytes in place of e4m3, which some GPUs that Triton compiles for do not have."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _token_bytes(kv: StoredKV, sizes: Mapping[str, int]) -> int:
    """Bytes of a token's keys and values that a program reads."""
    values = 0 if sizes["REST_BLOCK"] else sizes["VALUE"]
    return kv.k.element_size() * (sizes["WIDTH"] + values)


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
def _load_query(query, row, head, asked, START: tl.constexpr, END: tl.constexpr, dim):
    """``[QUERIES, channels] float32``, channels from START on; those from END on are 0."""
    data, stride_row, stride_head, stride_dim = query
    source = data + row * stride_row + head[:, None] * stride_head
    channel = START + dim
    seen = asked[:, None] & (channel < END)[None, :]
    return tl.load(source + channel[None, :] * stride_dim, mask=seen, other=0.0).to(tl.float32)


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
    x = tl.load(source[:, None] + dim[None, :], mask=seen, other=0.0)
    return (_from_codes(x) if SCALED else x).to(kind)


@triton.jit
def _range_of_split(length, split, splits, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """The first token of a split, the one after its last, and the oldest that is attended."""
    oldest, base = 0, 0
    if WINDOW > 0:
        # Steps begin at multiples of TOKENS, so that a step's pages are whole.
        oldest = tl.maximum(length - WINDOW, 0)
        base = oldest // TOKENS * TOKENS
    share = tl.cdiv(tl.cdiv(length - base, splits), TOKENS) * TOKENS
    begin = base + split * share
    return begin, tl.minimum(begin + share, length), oldest


@triton.jit
def _attend_kernel(
    query,  # [R, Q, Dk], and its strides
    keys,  # [N, Hr, S, Dk], and its strides of pages, heads and tokens
    values,  # [N, Hr, S, Dv], and the same
    scales,  # [N, Hr, S, 2], and the same, if SCALED
    page_table,  # [R, P], and its strides
    seq_lens,  # [R]
    results,  # out [R, Q, Dv] and lse [R, Q]
    partials,  # of splits, if SPLIT: [R, splits, Q, Dv] and [R, splits, Q]
    arrivals,  # [R, blocks of queries], 0, if SPLIT
    scale,  # softmax scale
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
    key_data, key_page, key_head, key_token = keys
    value_data, value_page, value_head, value_token = values
    scale_data, scale_page, scale_head, scale_token = scales
    table, table_row, table_entry = page_table
    row = tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    head = (tl.program_id(1) // blocks).to(tl.int64)
    block = tl.program_id(1) % blocks * QUERIES
    member = block + tl.arange(0, QUERIES)
    asked, own = member < GROUP, head * GROUP + member
    first, dim = tl.arange(0, FIRST_BLOCK), tl.arange(0, VALUE_BLOCK)
    narrow: tl.constexpr = tl.bfloat16 if SCALED else key_data.dtype.element_ty
    kind: tl.constexpr = tl.float32 if INTERPRETED else narrow
    q = _load_query(query, row, own, asked, 0, FIRST, first)
    parts = _query_parts(q, narrow, kind, EXACT)
    if REST_BLOCK > 0:
        rest = tl.arange(0, REST_BLOCK)
        q_rest = rounded(_load_query(query, row, own, asked, FIRST, WIDTH, rest), narrow).to(kind)
    length, split = tl.load(seq_lens + row), tl.program_id(0)
    begin, end, oldest = _range_of_split(length, split, splits, TOKENS, WINDOW)
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    # Added up over the tokens of a step at the end: a sum over threads in each step costs barriers.
    totals = tl.zeros((QUERIES, TOKENS), tl.float32)
    acc = tl.zeros((QUERIES, VALUE_BLOCK), tl.float32)
    key_data += head * key_head
    value_data += head * value_head
    entries = table + row * table_row
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
        k = _load_tokens(key_data + place, live, first, FIRST, kind, SCALED)
        logits = tl.dot(parts[0], tl.trans(k), input_precision="ieee")
        for part in tl.static_range(1, len(parts)):
            logits += tl.dot(parts[part], tl.trans(k), input_precision="ieee")
        if REST_BLOCK > 0:
            k_rest = _load_tokens(key_data + place + FIRST, live, rest, WIDTH - FIRST, kind, False)
            logits += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
            v = k
        else:
            place = place if SAME else at * value_page + inside * value_token
            v = _load_tokens(value_data + place, live, dim, VALUE, kind, SCALED)
        logits *= scale
        if SCALED:
            spot = scale_data + at * scale_page + head * scale_head + inside * scale_token
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
    acc, summed = _normalized(acc, tl.sum(totals, axis=1), highest)
    if SPLIT:
        store_attended(partials, (row * splits + split) * queries + own, acc, summed, asked, VALUE)
        arrival = arrivals + row * tl.num_programs(1) + tl.program_id(1)
        which = (row, head * GROUP + block, GROUP - block)
        merge_last(
            results, partials, arrival, which, queries, splits, VALUE, VALUE_BLOCK, MEMBERS, MERGED
        )
    else:
        store_attended(results, row * queries + own, acc, summed, asked, VALUE)


@triton.jit
def _normalized(acc, total, highest):
    """The output and its log-sum-exp: without a token 0 and -inf."""
    some = tl.where(total > 0, total, 1.0)
    acc = acc * tl.where(total > 0, 1.0 / some, 0.0)[:, None]
    return acc, tl.where(total > 0, highest + tl.log(some), -float("inf"))
