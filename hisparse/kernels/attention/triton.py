"""Attention over pages in Triton: flash decoding, split over the tokens of a row.

A program is a block of the queries that share one KV head, and a split of the row's tokens. The
program of a block that ends last merges the splits by log-sum-exp: one launch.
https://arxiv.org/abs/2205.14135 has the idea.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.attention.triton_chunk import chunk_attention as chunk_attention
from hisparse.kernels.attention.triton_splits import (
    arrival_counters,
    merge_last,
    merged_at_once,
    normalized,
    num_splits,
    range_of_split,
    store_attended,
)
from hisparse.kernels.attention.triton_splits import merge_attention as merge_attention
from hisparse.kernels.triton_common import (
    INTERPRETED,
    LARGEST_SHARED,
    cap_logits,
    dot_block,
    existing,
    key_blocks,
    require_dense_rows,
    rounded,
    same_places,
    shared_bytes,
)
from hisparse.types import AttentionRule, StoredKV

_MAX_QUERIES = 32
#: CUDA's limit on the third dimension of a grid.
_MAX_ROWS = 65_535


class _AttendConstants(NamedTuple):
    """What the kernel is compiled for; ``*_block`` are sizes rounded up to a power of two."""

    group: int  # query heads of a KV head
    queries: int  # of them that a program serves, with padding
    members: int  # the same where splits are merged, whose padding is smaller
    width: int  # Dk, of a key
    first: int  # channels of a key that are read at once: all, or those that are the value too
    first_block: int  # the same, as a block
    rest_block: int  # the channels after them; 0: there are none
    value_width: int  # Dv, of a value
    value_block: int  # the same, as a block
    same: bool  # whether keys and values of a token lie at the same offsets
    size: int  # S, tokens of a page
    tokens: int  # of a step of the loop
    exact: bool  # whether queries and weights are split into numbers of the pages' dtype
    scaled: bool  # whether pages have scales
    split: bool  # whether several programs share a row's tokens
    merged: int  # splits that a program merges at once
    logit_cap: float  # see :class:`hisparse.types.AttentionRule`; 0: none
    window: int  # tokens of the rule's window; 0: none


def paged_attention(
    query: Tensor, kv: StoredKV, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
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
    if rows > _MAX_ROWS:
        parts = zip(*(x.split(_MAX_ROWS) for x in (query, page_table, seq_lens)), strict=True)
        results = [paged_attention(q, kv, table, lens, rule) for q, table, lens in parts]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])
    require_dense_rows(k=kv.k, v=kv.v, scales=kv.scales)
    seq_lens, const = seq_lens.contiguous(), _constants(query, kv, rule)
    heads, value = kv.k.shape[1], const.value_width
    blocks = heads * triton.cdiv(const.group, const.queries)
    splits = num_splits(
        query.device,
        rows * blocks,
        1 if const.first > 128 else 2,
        page_table.shape[1] * const.size,
        _token_bytes(kv, const) / (4 * const.members * value),
    )
    out = query.new_empty(rows, queries, value)
    lse = query.new_empty(rows, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    shape = (rows, splits, queries) if splits > 1 else (0, 0, 0)
    arrivals = arrival_counters(rows * blocks, query.device) if splits > 1 else seq_lens
    k, v = map(_readable, kv.kv)
    # Where there are no scales, none are read.
    scales = (seq_lens, 0, 0, 0) if kv.scales is None else (kv.scales, *kv.scales.stride()[:3])
    tokens, options = launch_options(const.first, kv.k.dtype, shared_bytes(query.device))
    if const.logit_cap and kv.k.dtype != torch.float32:
        # ptxas would rather spill up to 48 bytes than run a block less at once.
        options.setdefault("maxnreg", 255)
    _attend_kernel[(splits, blocks, rows)](
        (query, *query.stride()),
        ((k, *k.stride()[:3]), (v, *v.stride()[:3])),
        scales,
        (page_table, *page_table.stride(), seq_lens),
        (out, lse),
        (lse.new_empty(*shape, value), lse.new_empty(shape), arrivals),
        (rule.scale, queries, splits, page_table.shape[1] * const.size, kv.k.shape[0]),
        const._replace(tokens=tokens, split=splits > 1),
        **options,
    )
    return out, lse


def _constants(query: Tensor, kv: StoredKV, rule: AttentionRule) -> _AttendConstants:
    """Constants that follow from tensors, and a step of no tokens and one split."""
    heads, size = kv.k.shape[1:3]
    blocks = key_blocks(kv.k, kv.v)
    group = query.shape[1] // heads
    query_block = min(dot_block(group), _MAX_QUERIES)
    members = min(triton.next_power_of_2(group), query_block)
    dtype = kv.k.dtype if kv.scales is None else torch.bfloat16
    return _AttendConstants(
        group=group,
        queries=query_block,
        members=members,
        **blocks,
        same=same_places(kv.k, kv.v),
        size=size,
        tokens=0,
        exact=not blocks["rest_block"] and dtype != torch.float32 and query.dtype != dtype,
        scaled=kv.scales is not None,
        split=False,
        merged=merged_at_once(members * blocks["value_block"]),
        logit_cap=float(rule.logit_cap),
        window=rule.window,
    )


def _readable(x: Tensor) -> Tensor:
    """Bytes in place of e4m3, which some GPUs that Triton compiles for do not have."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _token_bytes(kv: StoredKV, const: _AttendConstants) -> int:
    """Bytes of a token's keys and values that a program reads."""
    values = 0 if const.rest_block else const.value_width
    return kv.k.element_size() * (const.width + values)


def launch_options(
    width: int, dtype: torch.dtype, most_shared: int = LARGEST_SHARED
) -> tuple[int, dict[str, int]]:
    """Tokens per loop step; and warps and stages, chosen so that no kernel spills registers.

    With three stages, two steps of keys and values are in shared memory, one of them on its way.
    """
    if width > 128 and dtype == torch.float32:
        return 16, {"num_warps": 8 if width <= 256 else 16, "num_stages": 2}
    if width > 256 and most_shared < LARGEST_SHARED:
        return 32, {"num_warps": 8, "num_stages": 2}
    if width > 128:
        return 32, {"num_warps": 8, "num_stages": 3}
    if dtype == torch.float32:
        # As in chunk_options: Triton 3.6 would spill for sm_100.
        return 16, {"num_warps": 4, "num_stages": 3, "maxnreg": 255}
    # For int8 and sm_90 ptxas would spill 20 bytes, to run three blocks at once.
    return 64, {"num_warps": 4, "num_stages": 3} | ({"maxnreg": 255} if dtype == torch.int8 else {})


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
def _load_pages(entries, token, start, end, const: tl.constexpr):
    """Load the pages of a step's tokens, from ``start`` on; one page if it has all of them."""
    table, stride, count = entries
    if const.size % const.tokens == 0:
        page = tl.load(table + start // const.size * stride, mask=start < end, other=0)
    else:
        page = tl.load(table + token // const.size * stride, mask=token < end, other=0)
    return existing(page, count)


@triton.jit
def _load_query(query, row, head, asked, START: tl.constexpr, END: tl.constexpr, dim):
    """``[queries, channels] float32``, channels from START on; those from END on are 0."""
    data, stride_row, stride_head, stride_dim = query
    source = data + row * stride_row + head[:, None] * stride_head
    channel = START + dim
    seen = asked[:, None] & (channel < END)[None, :]
    return tl.load(source + channel[None, :] * stride_dim, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _load_queries(query, row, head, asked, narrow: tl.constexpr, const: tl.constexpr):
    """Queries as parts, see :func:`_query_parts`; and their channels after the first ones."""
    first = tl.arange(0, const.first_block)
    q = _load_query(query, row, head, asked, 0, const.first, first)
    parts = _query_parts(q, narrow, const.exact)
    q_rest = parts[0]
    if const.rest_block > 0:
        rest = tl.arange(0, const.rest_block)
        q = _load_query(query, row, head, asked, const.first, const.width, rest)
        q_rest = rounded(q, narrow).to(tl.float32 if INTERPRETED else narrow)
    return parts, q_rest


@triton.jit
def _query_parts(q, narrow: tl.constexpr, EXACT: tl.constexpr):
    """Numbers of ``narrow`` whose sum is ``q``: three if EXACT, or else one, which rounds it."""
    kind: tl.constexpr = tl.float32 if INTERPRETED else narrow
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
    source,  # [tokens], the first channel of each token
    live,  # [tokens]
    dim,  # [channels]
    COUNT: tl.constexpr,
    kind: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``[tokens, channels]``, keys or values; channels from COUNT on are 0."""
    seen = live[:, None] if dim.shape[0] == COUNT else live[:, None] & (dim < COUNT)[None, :]
    x = tl.load(source[:, None] + dim[None, :], mask=seen, other=0.0)
    return (_from_codes(x) if SCALED else x).to(kind)


@triton.jit
def _load_step(queries, pages, head, at, inside, live, const: tl.constexpr):
    """q.k of a step's tokens, ``[queries, tokens]``, and their values, ``[tokens, channels]``."""
    parts, q_rest = queries
    keys, key_page, key_head, key_token = pages[0]
    values, value_page, value_head, value_token = pages[1]
    kind: tl.constexpr = q_rest.dtype
    first, dim = tl.arange(0, const.first_block), tl.arange(0, const.value_block)
    place = at * key_page + inside * key_token
    source = keys + head * key_head + place
    k = _load_tokens(source, live, first, const.first, kind, const.scaled)
    logits = tl.dot(parts[0], tl.trans(k), input_precision="ieee")
    for part in tl.static_range(1, len(parts)):
        logits += tl.dot(parts[part], tl.trans(k), input_precision="ieee")
    if const.rest_block > 0:
        rest = tl.arange(0, const.rest_block)
        COUNT: tl.constexpr = const.width - const.first
        k_rest = _load_tokens(source + const.first, live, rest, COUNT, kind, False)
        logits += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        v = k
    else:
        place = place if const.same else at * value_page + inside * value_token
        source = values + head * value_head + place
        v = _load_tokens(source, live, dim, const.value_width, kind, const.scaled)
    return logits, v


@triton.jit
def _weights(logits, highest):
    """exp(logit - highest so far), the factor that rescales earlier sums, and that highest."""
    top = tl.maximum(highest, tl.max(logits, axis=1))
    return tl.exp(logits - top[:, None]), tl.exp(highest - top)[:, None], top


@triton.jit
def _add_values(acc, weights, v, narrow: tl.constexpr, EXACT: tl.constexpr):
    """``acc + weights @ v``; weights are the sum of two numbers of ``narrow`` if EXACT."""
    high = rounded(weights, narrow)
    acc += tl.dot(high.to(v.dtype), v, input_precision="ieee")
    if EXACT:
        low = rounded(weights - high.to(tl.float32), narrow)
        acc += tl.dot(low.to(v.dtype), v, input_precision="ieee")
    return acc


@triton.jit
def _attend_kernel(
    query,  # [R, Q, Dk], and its strides
    pages,  # k and v [N, Hr, S, D], each with its strides of pages, heads and tokens
    scales,  # [N, Hr, S, 2], and the same strides, if there are any
    rows,  # page table [R, P], and its strides; tokens of each row [R]
    results,  # out [R, Q, Dv] and lse [R, Q]
    partials,  # of splits: [R, splits, Q, Dv], [R, splits, Q]; counters [R, blocks of queries], 0
    numbers,  # softmax scale, Q, splits, tokens of the page table, N
    const: tl.constexpr,
):
    table, table_row, table_entry, seq_lens = rows
    QUERIES: tl.constexpr = const.queries
    TOKENS: tl.constexpr = const.tokens
    VALUE_BLOCK: tl.constexpr = const.value_block
    narrow: tl.constexpr = tl.bfloat16 if const.scaled else pages[0][0].dtype.element_ty
    row, split = tl.program_id(2).to(tl.int64), tl.program_id(0)
    blocks: tl.constexpr = (const.group + QUERIES - 1) // QUERIES
    head = (tl.program_id(1) // blocks).to(tl.int64)
    block = tl.program_id(1) % blocks * QUERIES
    asked = block + tl.arange(0, QUERIES) < const.group
    own = head * const.group + block + tl.arange(0, QUERIES)
    q = _load_queries(query, row, own, asked, narrow, const)
    begin, end, oldest = range_of_split(tl.load(seq_lens + row), split, numbers, const)
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    # Added up over the tokens of a step at the end: a sum over threads in each step costs barriers.
    totals = tl.zeros((QUERIES, TOKENS), tl.float32)
    acc = tl.zeros((QUERIES, VALUE_BLOCK), tl.float32)
    entries, step = (table + row * table_row, table_entry, numbers[4]), tl.arange(0, TOKENS)
    page = _load_pages(entries, begin + step, begin, end, const)
    for start in range(begin, end, TOKENS):
        token = start + step
        live = (token >= oldest) & (token < end) if const.window > 0 else token < end
        # A token's place in its page. Where a step is whole pages, this is the same in all steps.
        inside = (step if TOKENS % const.size == 0 else token) % const.size
        at = page.to(tl.int64)
        # A step ahead: the keys' addresses are known before the step, so that they can be fetched
        # while the steps before it compute.
        page = _load_pages(entries, token + TOKENS, start + TOKENS, end, const)
        logits, v = _load_step(q, pages, head, at, inside, live, const)
        logits *= numbers[0]
        if const.scaled:
            scale_data, scale_page, scale_head, scale_token = scales
            spot = scale_data + at * scale_page + head * scale_head + inside * scale_token
            logits *= _load_scale(spot, live)[None, :]
        if const.logit_cap > 0:
            logits = cap_logits(logits, const.logit_cap)
        weights, shrink, highest = _weights(tl.where(live[None, :], logits, -float("inf")), highest)
        totals = totals * shrink + weights
        if const.scaled:
            weights *= _load_scale(spot + 1, live)[None, :]
        acc = _add_values(acc * shrink, weights, v, narrow, const.exact)
    acc, summed = normalized(acc, tl.sum(totals, axis=1), highest)
    if const.split:
        place = (row * numbers[2] + split) * numbers[1] + own
        store_attended((partials[0], partials[1]), place, acc, summed, asked, const.value_width)
        which = (row, head * const.group + block, const.group - block)
        merge_last(results, partials, which, numbers, const)
    else:
        store_attended(results, row * numbers[1] + own, acc, summed, asked, const.value_width)
