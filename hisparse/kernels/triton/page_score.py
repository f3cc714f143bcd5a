"""Scores of pages by their summaries, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["page_score"]

#: Values of a tile; with more than 64 a thread of each kind, registers spill.
_TILE = 4096
_MOST_PAGES = 16


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.page_score`; the heads of a group share a loaded summary."""
    batch, q_heads, dim = query.shape
    (ranges, kv_heads), width = summaries.shape[1:3], host_page_table.shape[1]
    scores = query.new_empty(batch, q_heads, width)
    if scores.numel() == 0:
        return scores
    dim_block = triton.next_power_of_2(dim)
    pages = max(1, min(_MOST_PAGES, _TILE // dim_block))
    grid = (triton.cdiv(width, pages), kv_heads, batch)
    _score_kernel[grid](
        query.contiguous(),
        summaries,
        host_page_table,
        num_pages,
        scores,
        # Not read where there are no scales.
        query if scales is None else scales.contiguous(),
        width,
        *summaries.stride()[:3],
        *host_page_table.stride(),
        q_heads,
        kv_heads,
        GROUP=q_heads // kv_heads,
        GROUP_BLOCK=triton.next_power_of_2(q_heads // kv_heads),
        RANGES=ranges,
        DIM=dim,
        DIM_BLOCK=dim_block,
        PAGES=pages,
        SCALED=scales is not None,
    )
    return scores


@triton.jit
def _score_kernel(
    query,  # [B, Hq, D]
    summaries,  # [host pages, RANGES, Hkv, 2D]
    host_page_table,  # [B, P]
    num_pages,  # [B]
    scores,  # [B, Hq, P]
    scales,  # [host pages, RANGES, Hkv], if SCALED
    width,
    stride_page,
    stride_range,
    stride_head,
    stride_table,
    stride_entry,
    q_heads,
    kv_heads,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    RANGES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    SCALED: tl.constexpr,
):
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    dim = tl.arange(0, DIM_BLOCK)
    present = page < tl.load(num_pages + request)
    entry = host_page_table + request * stride_table + page * stride_entry
    host_page = tl.load(entry, mask=present, other=0).to(tl.int64)
    there = present[:, None] & (dim[None, :] < DIM)
    source = summaries + host_page[:, None] * stride_page + head * stride_head + dim[None, :]
    first = request * q_heads + head * GROUP
    member = tl.arange(0, GROUP_BLOCK)[:, None]
    best = tl.full((GROUP_BLOCK, PAGES), -float("inf"), tl.float32)
    for part in range(RANGES):
        high = tl.load(source + part * stride_range, mask=there, other=0.0).to(tl.float32)
        low = tl.load(source + part * stride_range + DIM, mask=there, other=0.0).to(tl.float32)
        scale = tl.full((PAGES,), 1.0, tl.float32)
        if SCALED:
            factor = (host_page * RANGES + part) * kv_heads + head
            scale = tl.load(scales + factor, mask=present, other=0.0)
        for g in range(GROUP):
            q = tl.load(query + (first + g) * DIM + dim, mask=dim < DIM, other=0.0)
            above, below = tl.maximum(q, 0.0), tl.minimum(q, 0.0)
            bound = scale * tl.sum(high * above[None, :] + low * below[None, :], axis=1)
            best = tl.where(member == g, tl.maximum(best, bound[None, :]), best)
    best = tl.where(present[None, :], best, -float("inf"))
    out = scores + (first + member) * width + page[None, :]
    tl.store(out, best, mask=(member < GROUP) & (page < width)[None, :])
