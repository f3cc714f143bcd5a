"""Summaries of pages, and scores by them, in Triton."""

from typing import NamedTuple

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
    require_dense_rows,
)

#: Channels of a warp at least: four a thread.
_CHANNELS = 128
#: The smallest number of queries that a matrix product takes.
_MIN_QUERIES = 8


class _ScoreConstants(NamedTuple):
    """What a kernel that scores is compiled for."""

    group: int  # query heads of a KV head
    queries: int  # of them that a program serves
    pages: int  # that a program scores
    ranges: int  # of a page
    dim: int  # D, width of a key
    columns: int  # of a summary that are multiplied at once, a power of two
    parts: int  # numbers that a query's number is split into, see :func:`num_parts`
    fp8: bool  # whether summaries are float8_e4m3fn
    as_bytes: bool  # whether these are converted in registers
    scaled: bool  # whether they have scales


class _SummaryConstants(NamedTuple):
    """What the kernel that stores summaries is compiled for."""

    ranges: int  # of a page
    size: int  # tokens of a range
    dim: int  # D, width of a key
    dim_block: int  # the same, rounded up to a power of two
    narrow: bool  # whether summaries are bfloat16
    fp8: bool  # whether they are float8_e4m3fn


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
    require_dense_rows(summaries=summaries)
    group = q_heads // kv_heads
    fp8 = summaries.dtype == torch.float8_e4m3fn
    as_bytes = fp8 and not reads_e4m3(query.device)
    parts = num_parts(query.dtype, torch.float16 if fp8 else summaries.dtype)
    tile = _tile_sizes(dim, group, summaries.dtype, parts)
    blocks = triton.cdiv(group, tile["queries"])
    _score_kernel[(triton.cdiv(width, tile["pages"]), kv_heads * blocks, batch)](
        (query, *query.stride()),
        (
            summaries.view(torch.uint8) if as_bytes else summaries,
            *summaries.stride()[:3],
            # Not read where there are no scales.
            query if scales is None else scales.contiguous(),
        ),
        (host_page_table, *host_page_table.stride(), num_pages.contiguous()),
        scores,
        (width, q_heads, kv_heads, summaries.shape[0]),
        scale,
        _ScoreConstants(
            group=group,
            ranges=ranges,
            dim=dim,
            parts=parts,
            fp8=fp8,
            as_bytes=as_bytes,
            scaled=scales is not None,
            **tile,
        ),
        # Two more buffers of summaries would take the registers of two more blocks.
        num_stages=1,
        # Of wide bfloat16 keys ptxas would spill 16 bytes to run eight blocks at once.
        maxnreg=128 if tile["pages"] == 32 and not fp8 else None,
    )
    return scores


def _tile_sizes(dim: int, group: int, dtype: torch.dtype, parts: int) -> dict[str, int]:
    """Sizes of a program's tiles, chosen so that no kernel spills registers."""
    columns = triton.next_power_of_2(max(2 * dim, 16))
    queries = max(_MIN_QUERIES, triton.next_power_of_2(group))
    if dtype == torch.float32:
        block = 64 if columns > 256 else min(32, columns)
        return {"columns": block, "queries": _MIN_QUERIES, "pages": 16}
    if columns > 256:
        pages = (32 if parts == 1 else 16) * (2 if dtype == torch.float8_e4m3fn else 1)
        return {"columns": 64, "queries": min(16, queries), "pages": pages}
    return {"columns": columns, "queries": min(16, queries), "pages": 64}


@triton.jit
def _signed(query, start, asked, const: tl.constexpr):
    """The query's positive numbers where a summary has maxima, its negative ones at the minima."""
    source, stride = query
    column = start + tl.arange(0, const.columns)
    channel = tl.where(column < const.dim, column, column - const.dim)
    there = asked[:, None] & (column < 2 * const.dim)[None, :]
    q = tl.load(source[:, None] + (channel * stride)[None, :], mask=there, other=0.0)
    q = q.to(tl.float32)
    # Not tl.maximum, which would drop NaN.
    left_out = tl.where((column < const.dim)[None, :], q < 0, q > 0)
    return tl.where(left_out, 0.0, q)


@triton.jit
def _powers(query, q, asked, const: tl.constexpr):
    """Powers of two for queries whose summaries have eight bits, and their inverses."""
    largest = tl.max(tl.abs(q), axis=1)
    for start in range(const.columns, 2 * const.dim, const.columns):
        more = _signed(query, start, asked, const)
        largest = tl.maximum(largest, tl.max(tl.abs(more), axis=1))
    return power_of(largest)


@triton.jit
def _score_kernel(
    query,  # [B, Hq, D], and its strides
    summaries,  # [host pages, ranges, Hkv, 2D], its strides of pages, ranges and heads, and scales
    host_pages,  # [B, P], and its strides; pages of each request [B]
    scores,  # [B, Hq, P]
    shape,  # P, Hq, Hkv, host pages
    scale,
    const: tl.constexpr,
):
    query_data, query_request, query_head, query_dim = query
    summary_data, stride_page, stride_range, stride_head, scales = summaries
    table, stride_table, stride_entry, num_pages = host_pages
    width, q_heads, kv_heads, num_host_pages = shape
    PAGES: tl.constexpr = const.pages
    QUERIES: tl.constexpr = const.queries
    request = tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (const.group + QUERIES - 1) // QUERIES
    head = tl.program_id(1) // blocks
    member = tl.program_id(1) % blocks * QUERIES + tl.arange(0, QUERIES)
    asked = member < const.group

    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    row = request * q_heads + head * const.group + member
    target = scores + row[None, :] * width + page[:, None]
    count = tl.minimum(tl.load(num_pages + request), width)
    # A captured step has programs for the longest context.
    if tl.program_id(0) * PAGES >= count:
        return
    present = page < count
    entry = table + request * stride_table + page * stride_entry
    host_page = tl.load(entry, mask=present, other=0)
    # As `existing`, with which ptxas spills for sm_100.
    host_page = tl.where(host_page < num_host_pages, host_page, num_host_pages - 1)
    host_page = tl.maximum(host_page, 0).to(tl.int64)
    rows = summary_data + host_page * stride_page + head * stride_head
    source = query_data + request * query_request + (head * const.group + member) * query_head
    factor = tl.full((QUERIES,), scale, tl.float32)
    up = tl.full((QUERIES,), 1.0, tl.float32)
    q = _signed((source, query_dim), 0, asked, const)
    if const.fp8:
        up, down = _powers((source, query_dim), q, asked, const)
        # The 2^8 are those that from_e4m3 leaves out.
        factor *= down * (256.0 if const.as_bytes else 1.0)
    q *= up[:, None]
    best = tl.full((PAGES, QUERIES), -float("inf"), tl.float32)
    for part in range(const.ranges):
        place = rows[:, None] + part * stride_range
        bound = _bound(place, present, q, (source, query_dim), up, asked, const)
        if const.scaled:
            own = (host_page * const.ranges + part) * kv_heads + head
            bound *= tl.load(scales + own, mask=present)[:, None]
        best = tl.maximum(best, bound, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, best * factor[None, :], mask=asked[None, :] & present[:, None])


@triton.jit
def _bound(place, present, q, query, up, asked, const: tl.constexpr):
    """Bounds of q.k by one range of pages, ``[pages, queries]``, without the range's scale."""
    COLUMNS: tl.constexpr = const.columns
    WIDTH: tl.constexpr = 2 * const.dim
    kind: tl.constexpr = tl.float16 if const.fp8 else place.dtype.element_ty
    wide: tl.constexpr = tl.float32 if INTERPRETED and kind == tl.bfloat16 else kind
    bound = tl.zeros((place.shape[0], up.shape[0]), tl.float32)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        there = present[:, None] & (column < WIDTH)[None, :]
        k = tl.load(place + column[None, :], mask=there, other=0.0)
        k = (from_e4m3(k) if const.as_bytes else k).to(wide)
        now = q if COLUMNS >= WIDTH else _signed(query, first, asked, const) * up[:, None]
        bound = dot_parts(k, now, bound, kind, const.parts)
    return bound


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
        # Not written to where there are no scales.
        host_pages if scales is None else scales,
        host_pages.contiguous(),
        (summaries.shape[0], heads),
        _SummaryConstants(
            ranges=ranges,
            size=size // ranges,
            dim=dim,
            dim_block=dim_block,
            narrow=summaries.dtype == torch.bfloat16,
            fp8=scales is not None,
        ),
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
    nearest = to_e4m3(tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))).to(tl.int32)
    half = (((nearest & 0x80) << 8) | ((nearest & 0x7F) << 7)).to(tl.int16)
    read = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    short = (read < x) if UP else (read > x)
    towards_zero = (read < 0) if UP else (read > 0)
    stepped = tl.where(towards_zero, nearest - 1, nearest + 1)
    # A zero of the other sign steps to the first number on this side.
    stepped = tl.where(nearest == (0x80 if UP else 0x00), 0x01 if UP else 0x81, stepped)
    number = tl.where(short, stepped, nearest)
    # Beyond the largest number, and NaN.
    return tl.where((x <= 448.0) if UP else (x >= -448.0), number, 0x7F).to(tl.uint8)


@triton.jit
def _summary_kernel(
    keys,  # [P, S, Hkv, D], and its strides
    summaries,  # [host pages, ranges, Hkv, 2D], and its strides of pages, ranges and heads
    scales,  # [host pages, ranges, Hkv], if there are any
    host_pages,  # [P]
    shape,  # host pages, Hkv
    const: tl.constexpr,
):
    key_data, stride_page, stride_token, stride_head, stride_dim = keys
    summary_data, stride_out_page, stride_out_range, stride_out_head = summaries
    num_host_pages, heads = shape
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % heads
    part = tl.program_id(1) // heads
    target = tl.load(host_pages + page).to(tl.int64)
    if target <= 0 or target >= num_host_pages:
        return
    dim = tl.arange(0, const.dim_block)
    there = dim < const.dim
    source = key_data + page * stride_page + head * stride_head + dim * stride_dim
    source += part * const.size * stride_token
    high = tl.load(source, mask=there, other=0.0).to(tl.float32)
    low = high
    for t in range(1, const.size):
        x = tl.load(source + t * stride_token, mask=there, other=0.0).to(tl.float32)
        high = tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL)
        low = tl.minimum(low, x, propagate_nan=tl.PropagateNan.ALL)
    out = summary_data + target * stride_out_page + part * stride_out_range
    out += head * stride_out_head + dim
    if const.fp8:
        # See summary/reference.py.
        bits = tl.maximum(tl.abs(high).to(tl.int32, bitcast=True), 0)
        bits = tl.maximum(bits, tl.abs(low).to(tl.int32, bitcast=True))
        # A GPU makes NaN with the largest fraction, to which nothing can be added.
        exponent = ((tl.minimum(tl.max(bits, axis=0), 0x7F800000) + 0x1FFFFF) >> 23) - 8
        exponent = tl.minimum(tl.maximum(exponent, 27), 227)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        high, low = high * inverse, low * inverse
        small_high, small_low = tl.abs(high) < 0.015625, tl.abs(low) < 0.015625
        raised = tl.where(high > 0, 0.015625, 0.0)
        # Times -1, for Triton makes 0.0 of the constant -0.0.
        lowered = tl.where(low < 0, 0.015625, 0.0) * -1.0
        high = tl.where(small_high & (small_low == 0), raised, high)
        low = tl.where(small_low & (small_high == 0), lowered, low)
        tl.store(out, _outward_e4m3(high, True), mask=there)
        tl.store(out + const.dim, _outward_e4m3(low, False), mask=there)
        place = (target * const.ranges + part) * heads + head
        tl.store(scales + place, (exponent << 23).to(tl.float32, bitcast=True))
    else:
        tl.store(out, _outward(high, const.narrow, True), mask=there)
        tl.store(out + const.dim, _outward(low, const.narrow, False), mask=there)
