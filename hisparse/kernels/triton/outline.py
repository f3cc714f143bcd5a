"""Scores of outlines in Triton, summed in another order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.sketch_layout import SCALE_OFFSET

__all__ = ["outline_score"]

#: Smallest sizes of a matrix product.
_PAGES = 16
_MOST_QUERIES = 16
_CHANNELS = 32
_OFFSET = tl.constexpr(SCALE_OFFSET)


def outline_score(
    query: Tensor, outlines: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.outline_score`; queries of a group share a decoded outline."""
    batch, q_heads, dim = query.shape
    kv_heads, width = outlines.shape[1], host_page_table.shape[1]
    scores = query.new_empty(batch, q_heads, width)
    if scores.numel() == 0:
        return scores
    group = q_heads // kv_heads
    parts = triton.cdiv(group, _MOST_QUERIES)
    _score_kernel[(triton.cdiv(width, _PAGES), kv_heads * parts, batch)](
        query.contiguous(),
        outlines,
        host_page_table,
        num_pages,
        scores,
        width,
        *outlines.stride()[:2],
        *host_page_table.stride(),
        q_heads,
        GROUP=group,
        QUERIES=_MOST_QUERIES,
        PARTS=parts,
        PAGES=_PAGES,
        DIM=dim,
        DIM_BLOCK=_CHANNELS,
        HALF=triton.cdiv(dim, 16) * 8,
    )
    return scores


@triton.jit
def _score_kernel(
    query,  # [B, Hq, D]
    outlines,  # [host pages, Hkv, bytes]
    host_page_table,  # [B, P]
    num_pages,  # [B]
    scores,  # [B, Hq, P]
    width,
    stride_page,
    stride_head,
    stride_table,
    stride_entry,
    q_heads,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    PAGES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    request = tl.program_id(2).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    present = page < tl.load(num_pages + request)
    entry = host_page_table + request * stride_table + page * stride_entry
    host_page = tl.load(entry, mask=present, other=0).to(tl.int64)
    source = (outlines + host_page * stride_page + head * stride_head)[:, None]
    member = part * QUERIES + tl.arange(0, QUERIES)
    row = request * q_heads + head * GROUP + member
    products = tl.zeros((PAGES, QUERIES), tl.float32)
    for start in range(0, DIM, DIM_BLOCK):
        dim = start + tl.arange(0, DIM_BLOCK)
        there = present[:, None] & (dim < DIM)[None, :]
        pair = tl.load(source + (dim % HALF)[None, :], mask=there, other=0).to(tl.int32)
        four = (pair >> (dim // HALF * 4)[None, :]) & 15
        value = (four - 16 * (four > 7).to(tl.int32)).to(tl.float32)
        code = tl.load(source + HALF + (dim // 8)[None, :], mask=there, other=0).to(tl.int32)
        scale = ((code + _OFFSET) << 20).to(tl.float32, bitcast=True)
        values = 1.4 * value * (tl.abs(value) + 6.0) * scale
        own = (member < GROUP)[None, :] & (dim < DIM)[:, None]
        q = tl.load(query + row[None, :] * DIM + dim[:, None], mask=own, other=0.0)
        products += tl.dot(values, q, input_precision="ieee")
    there = (member < GROUP)[None, :] & (page < width)[:, None]
    score = tl.where(present[:, None], products, -float("inf"))
    tl.store(scores + row[None, :] * width + page[:, None], score, mask=there)
