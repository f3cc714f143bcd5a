"""Attention over pages in Triton: flash decoding, split over the tokens of a row.

A program is a block of the queries that share one KV head, and a split of the row's tokens; a
second kernel merges the splits by log-sum-exp. https://arxiv.org/abs/2205.14135 has the idea.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.types import StoredKV

__all__ = ["launch_options", "paged_attention"]

#: The smallest size that ``tl.dot`` accepts; queries of a group are padded to it.
_MIN_DOT = 16
_MAX_QUERIES = 32
#: Tokens of a split at least; shorter splits cost more to merge than they save.
_MIN_SPLIT_TOKENS = 256
#: Triton's interpreter multiplies bfloat16 matrices as if they were integers.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
#: Splits that are merged at once: 16 x 512 values are 64 registers a thread.
_SPLITS_PER_STEP = 16
#: Programs for each multiprocessor of the GPU.
_WAVES = 2


def paged_attention(
    query: Tensor, kv: StoredKV, page_table: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.paged_attention`.

    If values are the first columns of the keys (MLA: 512 of 576), the kernel reads keys once for
    both and rounds queries and weights to the pages' dtype, because with so many queries per key
    arithmetic is the limit. Else it splits a query's number into three of that dtype and a weight
    into two, which keeps all 24 bits and 16 bits of a float32. It multiplies pages in eight bits as
    bfloat16, which is exact, and applies their scales to logits and weights.
    """
    rows, queries, width = query.shape
    heads, size = kv.k.shape[1:3]
    value_width = kv.v.shape[-1]
    group = queries // heads
    query_block = min(max(_MIN_DOT, triton.next_power_of_2(group)), _MAX_QUERIES)
    blocks = triton.cdiv(group, query_block)
    splits = _num_splits(query.device, rows * heads * blocks, page_table.shape[1] * size)
    out = query.new_empty(rows, splits, queries, value_width)
    lse = query.new_empty(rows, splits, queries)
    if out.numel() == 0:
        return out[:, 0], lse[:, 0]
    same_place = kv.v.data_ptr() == kv.k.data_ptr() and kv.v.stride() == kv.k.stride()
    shared = same_place and value_width < width
    first = value_width if shared else width
    fp8 = kv.scales is not None
    # Read as bytes, because some GPUs that Triton compiles for do not have this format.
    k, v = (x.view(torch.uint8) if fp8 else x for x in kv.kv)
    scales = seq_lens if kv.scales is None else kv.scales
    dtype = torch.bfloat16 if fp8 else kv.k.dtype
    _attend_kernel[(splits, heads * blocks, rows)](
        query.contiguous(),
        k,
        v,
        scales,
        page_table,
        seq_lens,
        out,
        lse,
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        *(scales.stride()[:3] if fp8 else (0, 0, 0)),
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
        VALUE_BLOCK=max(_MIN_DOT, triton.next_power_of_2(value_width)),
        SIZE=size,
        EXACT=not shared and dtype != torch.float32,
        FP8=fp8,
        WIDE=_INTERPRETED,
        **launch_options(first, kv.k.dtype),
    )
    return (out[:, 0], lse[:, 0]) if splits == 1 else _merged(out, lse)


def launch_options(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Tokens per loop step, warps and stages, chosen so that no kernel spills registers."""
    if width > 128:
        return {"TOKENS": 16, "num_warps": 8, "num_stages": 2}
    if dtype == torch.float8_e4m3fn:
        return {"TOKENS": 32, "num_warps": 4, "num_stages": 3}
    if dtype == torch.float32:
        return {"TOKENS": 16, "num_warps": 4, "num_stages": 2}
    return {"TOKENS": 64, "num_warps": 8, "num_stages": 3}


def _merged(partial: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the splits of ``[R, splits, Q, Dv]`` and ``[R, splits, Q]``, float32."""
    rows, splits, queries, width = partial.shape
    out = partial.new_empty(rows, queries, width)
    lse = lses.new_empty(rows, queries)
    split_block = triton.next_power_of_2(splits)
    _merge_kernel[(queries, rows)](
        partial,
        lses,
        out,
        lse,
        queries,
        splits,
        SPLITS=split_block,
        STEP=min(_SPLITS_PER_STEP, split_block),
        VALUE=width,
        VALUE_BLOCK=triton.next_power_of_2(width),
    )
    return out, lse


def _num_splits(device: torch.device, programs: int, most_tokens: int) -> int:
    """Splits that fill the GPU, without reading the lengths."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-_WAVES * processors // max(programs, 1))
    return max(1, min(wanted, -(-most_tokens // _MIN_SPLIT_TOKENS)))


@triton.jit
def _rounded(x, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round float32 to the nearest of ``kind``; the interpreter would truncate to bfloat16."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit
def _from_e4m3(x):
    """Convert e4m3 bytes to float16, times 2 ** -8, the difference of the exponents' biases."""
    bits = x.to(tl.int32)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _load_scale(place, live):
    """Load scales of tokens, times the 2 ** 8 that :func:`_from_e4m3` leaves out."""
    scale = tl.load(place, mask=live, other=0).to(tl.int32)
    return ((scale + 8) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _attend_kernel(
    query,  # [R, Q, Dk], times the softmax scale
    keys,  # [N, Hr, S, Dk]
    values,  # [N, Hr, S, Dv]
    scales,  # [N, Hr, S, 2], if pages are in eight bits
    page_table,  # [R, P]
    seq_lens,  # [R]
    out,  # [R, splits, Q, Dv]
    lse,  # [R, splits, Q]
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
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXACT: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    head = (tl.program_id(1) // blocks).to(tl.int64)
    member = tl.program_id(1) % blocks * QUERIES + tl.arange(0, QUERIES)
    asked = member < GROUP
    first, dim = tl.arange(0, FIRST_BLOCK), tl.arange(0, VALUE_BLOCK)
    narrow: tl.constexpr = tl.bfloat16 if FP8 else keys.dtype.element_ty
    kind: tl.constexpr = tl.float32 if WIDE else narrow
    source = query + (row * queries + head * GROUP + member)[:, None] * WIDTH
    q = tl.load(source + first[None, :], mask=asked[:, None] & (first < FIRST)[None, :], other=0.0)
    q_high = _rounded(q, narrow, WIDE)
    q_left = q - q_high.to(tl.float32)
    q_middle = _rounded(q_left, narrow, WIDE)
    q_low = _rounded(q_left - q_middle.to(tl.float32), narrow, WIDE).to(kind)
    q_high, q_middle = q_high.to(kind), q_middle.to(kind)
    if REST_BLOCK > 0:
        rest = FIRST + tl.arange(0, REST_BLOCK)
        more = asked[:, None] & (rest < WIDTH)[None, :]
        q_rest = tl.load(source + rest[None, :], mask=more, other=0.0)
        q_rest = _rounded(q_rest, narrow, WIDE).to(kind)
    length = tl.load(seq_lens + row)
    share = (length + splits - 1) // splits
    begin = split * share
    end = tl.minimum(begin + share, length)
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, VALUE_BLOCK), tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        live = token < end
        entry = page_table + row * table_row + token // SIZE * table_entry
        page = tl.load(entry, mask=live, other=0).to(tl.int64)
        place = keys + page * key_page + head * key_head + token % SIZE * key_token
        seen = live[:, None] & (first < FIRST)[None, :]
        k = tl.load(place[:, None] + first[None, :], mask=seen, other=0)
        k = (_from_e4m3(k) if FP8 else k).to(kind)
        logits = tl.dot(q_high, tl.trans(k), input_precision="ieee")
        if EXACT:
            logits += tl.dot(q_middle, tl.trans(k), input_precision="ieee")
            logits += tl.dot(q_low, tl.trans(k), input_precision="ieee")
        if REST_BLOCK > 0:
            seen_rest = live[:, None] & (rest < WIDTH)[None, :]
            k_rest = tl.load(place[:, None] + rest[None, :], mask=seen_rest, other=0.0).to(kind)
            logits += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
            v = k
        else:
            place = values + page * value_page + head * value_head + token % SIZE * value_token
            seen = live[:, None] & (dim < VALUE)[None, :]
            v = tl.load(place[:, None] + dim[None, :], mask=seen, other=0)
            v = (_from_e4m3(v) if FP8 else v).to(kind)
        if FP8:
            place = scales + page * scale_page + head * scale_head + token % SIZE * scale_token
            logits *= _load_scale(place, live)[None, :]
        logits = tl.where(live[None, :], logits, -float("inf"))
        top = tl.maximum(highest, tl.max(logits, axis=1))
        weights = tl.exp(logits - top[:, None])
        shrink = tl.exp(highest - top)
        total = total * shrink + tl.sum(weights, axis=1)
        if FP8:
            weights *= _load_scale(place + 1, live)[None, :]
        high = _rounded(weights, narrow, WIDE)
        acc = acc * shrink[:, None] + tl.dot(high.to(kind), v, input_precision="ieee")
        if EXACT:
            low = _rounded(weights - high.to(tl.float32), narrow, WIDE)
            acc += tl.dot(low.to(kind), v, input_precision="ieee")
        highest = top
    # Without a token the sum is 0: the output is 0 and its log-sum-exp -inf.
    scale = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    target = (row * splits + split) * queries + head * GROUP + member
    shown = asked[:, None] & (dim < VALUE)[None, :]
    tl.store(out + target[:, None] * VALUE + dim[None, :], acc * scale[:, None], mask=shown)
    summed = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
    tl.store(lse + target, summed, mask=asked)


@triton.jit
def _merge_kernel(
    partial,  # [R, splits, Q, Dv]
    lses,  # [R, splits, Q]
    out,  # [R, Q, Dv]
    lse,  # [R, Q]
    queries,
    splits,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    q, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, VALUE_BLOCK)
    first = row * splits * queries + q
    parts = tl.load(lses + first + split * queries, mask=split < splits, other=-float("inf"))
    top = tl.max(parts, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(parts - shift), axis=0)
    whole = tl.where(total > 0, total, 1.0)
    merged = tl.zeros((VALUE_BLOCK,), tl.float32)
    for start in range(0, splits, STEP):
        step = start + tl.arange(0, STEP)
        at = first + step * queries
        weights = tl.exp(tl.load(lses + at, mask=step < splits, other=-float("inf")) - shift)
        there = (step < splits)[:, None] & (dim < VALUE)[None, :]
        x = tl.load(partial + at[:, None] * VALUE + dim[None, :], mask=there, other=0.0)
        merged += tl.sum(x * weights[:, None], axis=0)
    target = row * queries + q
    tl.store(out + target * VALUE + dim, merged / whole, mask=dim < VALUE)
    tl.store(lse + target, tl.where(total > 0, shift + tl.log(whole), -float("inf")))
