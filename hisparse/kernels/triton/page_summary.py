"""Summaries of pages in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["page_summary"]

#: Values of a tile; with more than 64 a thread of each kind, registers spill.
_TILE = 8192


def page_summary(keys: Tensor, summaries: Tensor, host_pages: Tensor) -> None:
    """See :func:`hisparse.kernels.page_summary`; one program per page, head and block of D."""
    pages, size, heads, dim = keys.shape
    if pages == 0:
        return
    size_block = triton.next_power_of_2(size)
    dim_block = min(triton.next_power_of_2(dim), max(16, _TILE // size_block))
    _summary_kernel[(pages, heads, triton.cdiv(dim, dim_block))](
        keys,
        summaries,
        host_pages,
        *keys.stride(),
        *summaries.stride()[:2],
        summaries.shape[0],
        SIZE=size,
        SIZE_BLOCK=size_block,
        DIM=dim,
        DIM_BLOCK=dim_block,
        NARROW=summaries.dtype == torch.bfloat16,
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
def _summary_kernel(
    keys,  # [P, S, Hkv, D]
    summaries,  # [host pages, Hkv, 2D]
    host_pages,  # [P]
    stride_page,
    stride_token,
    stride_head,
    stride_dim,
    stride_out_page,
    stride_out_head,
    num_host_pages,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(host_pages + page).to(tl.int64)
    if target < 0 or target >= num_host_pages:
        return
    token = tl.arange(0, SIZE_BLOCK)[:, None]
    dim = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    source = keys + page * stride_page + head * stride_head
    source += token * stride_token + dim[None, :] * stride_dim
    there = (token < SIZE) & (dim[None, :] < DIM)
    x = tl.load(source, mask=there, other=0.0).to(tl.float32)
    high = tl.max(tl.where(token < SIZE, x, -float("inf")), axis=0)
    low = tl.min(tl.where(token < SIZE, x, float("inf")), axis=0)
    out = summaries + target * stride_out_page + head * stride_out_head + dim
    tl.store(out, _outward(high, NARROW, True), mask=dim < DIM)
    tl.store(out + DIM, _outward(low, NARROW, False), mask=dim < DIM)
