"""Summaries of pages in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.triton.quantize import to_e4m3

__all__ = ["page_summary"]

#: Channels of a warp at least: four a thread.
_CHANNELS = 128


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
        keys,
        summaries if scales is None else summaries.view(torch.uint8),
        host_pages.contiguous(),
        # Not written to where there are no scales.
        host_pages if scales is None else scales,
        *keys.stride(),
        *summaries.stride()[:3],
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
    keys,  # [P, S, Hkv, D]
    summaries,  # [host pages, RANGES, Hkv, 2D]
    host_pages,  # [P]
    scales,  # [host pages, RANGES, Hkv], if FP8
    stride_page,
    stride_token,
    stride_head,
    stride_dim,
    stride_out_page,
    stride_out_range,
    stride_out_head,
    num_host_pages,
    heads,
    RANGES: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    FP8: tl.constexpr,
):
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % heads
    part = tl.program_id(1) // heads
    target = tl.load(host_pages + page).to(tl.int64)
    if target <= 0 or target >= num_host_pages:
        return
    dim = tl.arange(0, DIM_BLOCK)
    there = dim < DIM
    source = keys + page * stride_page + head * stride_head + dim * stride_dim
    source += part * SIZE * stride_token
    high = tl.load(source, mask=there, other=0.0).to(tl.float32)
    low = high
    for t in range(1, SIZE):
        x = tl.load(source + t * stride_token, mask=there, other=0.0).to(tl.float32)
        high = tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL)
        low = tl.minimum(low, x, propagate_nan=tl.PropagateNan.ALL)
    out = summaries + target * stride_out_page + part * stride_out_range
    out += head * stride_out_head + dim
    if FP8:
        # See hisparse/kernels/reference/summary.py.
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
