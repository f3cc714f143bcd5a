"""Summaries of pages, and scores by them, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.quantize.triton import to_e4m3
from hisparse.kernels.triton_common import (
    INTERPRETED,
    dot_parts,
    from_e4m3,
    num_parts,
    power_of,
    reads_e4m3,
)

__all__ = ["launch_options", "page_score", "page_summary"]

#: Channels of a warp at least: four a thread.
_CHANNELS = 128
#: The smallest number of queries that a matrix product takes.
_MIN_QUERIES = 8


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
    scale: float,
) -> Tensor:
    """See :func:`hisparse.kernels.page_score`; the heads of a group share a loaded summary.

    A summary is one row, its maxima and then its minima. So its bound is the product with a row
    that has the query's positive numbers and then its negative ones. Products of summaries in eight
    or 16 bits are exact. A query in float32 keeps 22 bits, one in 16 bits all of them. For
    summaries in eight bits, a number of a query is off by 2^-39 of the query's largest at most.
    """
    batch, q_heads, dim = query.shape
    (ranges, kv_heads), width = summaries.shape[1:3], host_page_table.shape[1]
    scores = torch.empty(batch, q_heads, width, dtype=torch.float32, device=query.device)
    if scores.numel() == 0:
        return scores
    group = q_heads // kv_heads
    fp8 = summaries.dtype == torch.float8_e4m3fn
    as_bytes = fp8 and not reads_e4m3(query.device)
    parts = num_parts(query.dtype, torch.float16 if fp8 else summaries.dtype)
    options = launch_options(dim, group, summaries.dtype, parts)
    blocks = triton.cdiv(group, options["QUERIES"])
    grid = (triton.cdiv(width, options["PAGES"]), kv_heads * blocks, batch)
    _score_kernel[grid](
        (query, *query.stride()),
        (summaries.view(torch.uint8) if as_bytes else summaries, *summaries.stride()[:3]),
        (host_page_table, *host_page_table.stride()),
        num_pages.contiguous(),
        scores,
        # Not read where there are no scales.
        query if scales is None else scales.contiguous(),
        scale,
        width,
        q_heads,
        kv_heads,
        GROUP=group,
        RANGES=ranges,
        DIM=dim,
        PARTS=parts,
        FP8=fp8,
        BYTES=as_bytes,
        SCALED=scales is not None,
        **options,
    )
    return scores


def launch_options(dim: int, group: int, dtype: torch.dtype, parts: int) -> dict[str, int]:
    """Sizes of a program's tiles and stages, chosen so that no kernel spills registers."""
    columns = triton.next_power_of_2(max(2 * dim, 16))
    queries = max(_MIN_QUERIES, triton.next_power_of_2(group))
    if dtype == torch.float32:
        block = 64 if columns > 256 else min(32, columns)
        sizes = {"COLUMNS": block, "QUERIES": _MIN_QUERIES, "PAGES": 16}
    elif columns > 256:
        pages = 64 if dtype == torch.float8_e4m3fn and parts == 1 else 32
        sizes = {"COLUMNS": 64, "QUERIES": min(16, queries), "PAGES": pages}
    else:
        sizes = {"COLUMNS": columns, "QUERIES": min(16, queries), "PAGES": 64}
    # Two more buffers of summaries would take the registers of two more blocks.
    return sizes | {"num_stages": 1}


@triton.jit
def _signed(source, start, stride, asked, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """The query's positive numbers where a summary has maxima, its negative ones at the minima."""
    column = start + tl.arange(0, COLUMNS)
    channel = tl.where(column < DIM, column, column - DIM)
    there = asked[:, None] & (column < 2 * DIM)[None, :]
    q = tl.load(source[:, None] + (channel * stride)[None, :], mask=there, other=0.0)
    q = q.to(tl.float32)
    # Not tl.maximum, which would drop NaN.
    left_out = tl.where((column < DIM)[None, :], q < 0, q > 0)
    return tl.where(left_out, 0.0, q)


@triton.jit
def _score_kernel(
    query,  # [B, Hq, D], and its strides
    summaries,  # [host pages, RANGES, Hkv, 2D], and its strides of pages, ranges and heads
    host_page_table,  # [B, P], and its strides
    num_pages,  # [B]
    scores,  # [B, Hq, P]
    scales,  # [host pages, RANGES, Hkv], if SCALED
    scale,
    width,
    q_heads,
    kv_heads,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    RANGES: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGES: tl.constexpr,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
    BYTES: tl.constexpr,
    SCALED: tl.constexpr,
):
    query_data, query_request, query_head, query_dim = query
    summary_data, stride_page, stride_range, stride_head = summaries
    table, stride_table, stride_entry = host_page_table
    request = tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    head = tl.program_id(1) // blocks
    member = tl.program_id(1) % blocks * QUERIES + tl.arange(0, QUERIES)
    asked = member < GROUP
    kind: tl.constexpr = tl.float16 if FP8 else summary_data.dtype.element_ty
    wide: tl.constexpr = tl.float32 if INTERPRETED and kind == tl.bfloat16 else kind
    once: tl.constexpr = COLUMNS >= 2 * DIM

    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    row = request * q_heads + head * GROUP + member
    target = scores + row[None, :] * width + page[:, None]
    count = tl.load(num_pages + request)
    # A captured step has programs for the longest context.
    if tl.program_id(0) * PAGES >= count:
        return
    present = page < count
    entry = table + request * stride_table + page * stride_entry
    host_page = tl.load(entry, mask=present, other=0).to(tl.int64)
    rows = summary_data + host_page * stride_page + head * stride_head
    source = query_data + request * query_request + (head * GROUP + member) * query_head
    factor = tl.full((QUERIES,), scale, tl.float32)
    up = tl.full((QUERIES,), 1.0, tl.float32)
    q = _signed(source, 0, query_dim, asked, DIM, COLUMNS)
    if FP8:
        largest = tl.max(tl.abs(q), axis=1)
        for start in range(COLUMNS, 2 * DIM, COLUMNS):
            more = _signed(source, start, query_dim, asked, DIM, COLUMNS)
            largest = tl.maximum(largest, tl.max(tl.abs(more), axis=1))
        up, down = power_of(largest, 14)
        # The 2^8 are those that from_e4m3 leaves out.
        factor *= down * (256.0 if BYTES else 1.0)
    q *= up[:, None]
    best = tl.full((PAGES, QUERIES), -float("inf"), tl.float32)
    for part in range(RANGES):
        bound = tl.zeros((PAGES, QUERIES), tl.float32)
        for first in tl.static_range(0, 2 * DIM, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            there = present[:, None] & (column < 2 * DIM)[None, :]
            place = rows[:, None] + part * stride_range + column[None, :]
            k = tl.load(place, mask=there, other=0.0)
            k = (from_e4m3(k) if BYTES else k).to(wide)
            if once:
                now = q
            else:
                now = _signed(source, first, query_dim, asked, DIM, COLUMNS) * up[:, None]
            bound = dot_parts(k, now, bound, kind, PARTS)
        if SCALED:
            own = tl.load(scales + (host_page * RANGES + part) * kv_heads + head, mask=present)
            bound *= own[:, None]
        best = tl.maximum(best, bound, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, best * factor[None, :], mask=asked[None, :] & present[:, None])


def page_summary(
    keys: Tensor, summaries: Tensor, host_pages: Tensor, scales: Tensor | None
) -> None:
    """See :func:`hisparse.kernels.page_summary`; one program per page, range and head."""
    pages, size, heads, dim = keys.shape
    ranges = summaries.shape[1]
    if pages == 0:
        return
    dim_block = max(_CHANNELS, triton.next_power_of_2(dim))
    _summary_kernel[(pages, ranges * heads)](
        (keys, *keys.stride()),
        (summaries if scales is None else summaries.view(torch.uint8), *summaries.stride()[:3]),
        host_pages.contiguous(),
        # Not written to where there are no scales.
        host_pages if scales is None else scales,
        summaries.shape[0],
        heads,
        RANGES=ranges,
        SIZE=size // ranges,
        DIM=dim,
        DIM_BLOCK=dim_block,
        NARROW=summaries.dtype == torch.bfloat16,
        FP8=scales is not None,
        num_warps=min(8, dim_block // _CHANNELS),
    )


@triton.jit
def _outward(x, NARROW: tl.constexpr, UP: tl.constexpr):
    """Convert to float32, or to bfloat16 that is never below ``x`` if UP, else never above it."""
    if NARROW:
        # The upper half of a float32 is a bfloat16, rounded towards zero.
        bits = x.to(tl.int32, bitcast=True)
        away = ((bits & 0xFFFF) != 0) & ((x > 0) if UP else (x < 0))
        half = (bits >> 16) + away.to(tl.int32)
        rounded = half.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x
    return rounded


@triton.jit
def _outward_e4m3(x, UP: tl.constexpr):
    """The e4m3 byte that is next to ``x`` and not below it if UP, else not above it."""
    nearest = to_e4m3(x).to(tl.int32)
    half = (((nearest & 0x80) << 8) | ((nearest & 0x7F) << 7)).to(tl.int16)
    read = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    short = (read < x) if UP else (read > x)
    towards_zero = (read < 0) if UP else (read > 0)
    stepped = tl.where(towards_zero, nearest - 1, nearest + 1)
    # A zero of the other sign steps to the first number on this side.
    stepped = tl.where(nearest == (0x80 if UP else 0x00), 0x01 if UP else 0x81, stepped)
    number = tl.where(short, stepped, nearest)
    # Beyond the largest number, and NaN.
    return tl.where(tl.abs(x) <= 448.0, number, 0x7F).to(tl.uint8)


@triton.jit
def _summary_kernel(
    keys,  # [P, S, Hkv, D], and its strides
    summaries,  # [host pages, RANGES, Hkv, 2D], and its strides of pages, ranges and heads
    host_pages,  # [P]
    scales,  # [host pages, RANGES, Hkv], if FP8
    num_host_pages,
    heads,
    RANGES: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    FP8: tl.constexpr,
):
    key_data, stride_page, stride_token, stride_head, stride_dim = keys
    summary_data, stride_out_page, stride_out_range, stride_out_head = summaries
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % heads
    part = tl.program_id(1) // heads
    target = tl.load(host_pages + page).to(tl.int64)
    if target <= 0 or target >= num_host_pages:
        return
    dim = tl.arange(0, DIM_BLOCK)
    there = dim < DIM
    source = key_data + page * stride_page + head * stride_head + dim * stride_dim
    source += part * SIZE * stride_token
    high = tl.load(source, mask=there, other=0.0).to(tl.float32)
    low = high
    for t in range(1, SIZE):
        x = tl.load(source + t * stride_token, mask=there, other=0.0).to(tl.float32)
        high = tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL)
        low = tl.minimum(low, x, propagate_nan=tl.PropagateNan.ALL)
    out = summary_data + target * stride_out_page + part * stride_out_range
    out += head * stride_out_head + dim
    if FP8:
        # See summary/reference.py.
        bits = tl.maximum(tl.abs(high).to(tl.int32, bitcast=True), 0)
        bits = tl.maximum(bits, tl.abs(low).to(tl.int32, bitcast=True))
        exponent = ((tl.max(bits, axis=0) + 0x1FFFFF) >> 23) - 8
        exponent = tl.minimum(tl.maximum(exponent, 27), 227)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        high, low = high * inverse, low * inverse
        small_high, small_low = tl.abs(high) < 0.015625, tl.abs(low) < 0.015625
        raised = tl.where(high > 0, 0.015625, 0.0)
        lowered = tl.where(low < 0, -0.015625, -0.0)
        high = tl.where(small_high & (small_low == 0), raised, high)
        low = tl.where(small_low & (small_high == 0), lowered, low)
        tl.store(out, _outward_e4m3(high, True), mask=there)
        tl.store(out + DIM, _outward_e4m3(low, False), mask=there)
        place = (target * RANGES + part) * heads + head
        tl.store(scales + place, (exponent << 23).to(tl.float32, bitcast=True))
    else:
        tl.store(out, _outward(high, NARROW, True), mask=there)
        tl.store(out + DIM, _outward(low, NARROW, False), mask=there)
