"""Sketches of pages in Triton, the reference's bytes, and scores of outlines."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.sketch.op import MOST_SCALE, SCALE_OFFSET, SketchLayout

__all__ = ["outline_score", "page_sketch"]

#: Smallest sizes of a matrix product, for outlines.
_PAGES = 16
_MOST_QUERIES = 16
_CHANNELS = 32
_OFFSET, _MOST = tl.constexpr(SCALE_OFFSET), tl.constexpr(MOST_SCALE)


def page_sketch(keys: Tensor, sketches: Tensor, host_pages: Tensor, layout: SketchLayout) -> None:
    """See :func:`hisparse.kernels.page_sketch`; one program per page and head."""
    pages, _, heads, _ = keys.shape
    if pages == 0:
        return
    _sketch_kernel[(pages, heads)](
        (keys, *keys.stride()),
        (sketches, *sketches.stride()[:2]),
        host_pages.contiguous(),
        sketches.shape[0],
        SIZE=layout.page_size,
        DIM=layout.dim,
        DIM_BLOCK=max(8, triton.next_power_of_2(layout.dim)),
        COUNT=layout.num_channels,
        BLOCKS=layout.blocks,
        CODE_BYTES=layout.code_bytes,
        NUM_BYTES=layout.num_bytes,
    )


@triton.jit
def _scale_of(code):
    """The scale of a code, as float32."""
    return ((code.to(tl.int32) + _OFFSET) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _scale_code(scale):
    """The code of the smallest scale that is not below ``scale``."""
    code = ((scale.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - _OFFSET
    return tl.minimum(tl.maximum(code, 0), _MOST)


@triton.jit
def _widest(high, low, there, COUNT: tl.constexpr):
    """Whether a channel is among the COUNT with the largest ranges; ties go to the first."""
    # Non-negative floats have the order of their bits.
    bits = tl.where(there, (high - low).to(tl.int32, bitcast=True), -1)
    least = 0
    for i in range(31):
        higher = least | (1 << (30 - i))
        least = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= COUNT, higher, least)
    above, equal = (bits > least).to(tl.int32), (bits == least).to(tl.int32)
    room = COUNT - tl.sum(above)
    first = (tl.cumsum(equal, 0) <= room).to(tl.int32)
    return above + equal * first > 0


@triton.jit
def _sketch_kernel(
    keys,  # [P, S, Hkv, D], and its strides
    sketches,  # [host pages, Hkv, bytes], and its strides of pages and heads
    host_pages,  # [P]
    num_host_pages,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
):
    key_data, stride_page, stride_token, stride_head, stride_dim = keys
    sketch_data, stride_out_page, stride_out_head = sketches
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(host_pages + page).to(tl.int64)
    if target <= 0 or target >= num_host_pages:
        return
    dim = tl.arange(0, DIM_BLOCK)
    there = dim < DIM
    source = key_data + page * stride_page + head * stride_head + dim * stride_dim
    high = tl.load(source, mask=there, other=0.0).to(tl.float32)
    low, total = high, high
    for t in range(1, SIZE):
        x = tl.load(source + t * stride_token, mask=there, other=0.0).to(tl.float32)
        high, low, total = tl.maximum(high, x), tl.minimum(low, x), total + x
    base = tl.div_rn(total, tl.full((DIM_BLOCK,), SIZE, tl.float32))
    if COUNT > 0:
        chosen = _widest(high, low, there, COUNT)
        base = tl.where(chosen, high * 0.5 + low * 0.5, base)
    top = tl.max(tl.reshape(tl.abs(base), (DIM_BLOCK // 8, 8)), axis=1)
    block_code = _scale_code(tl.div_rn(top, tl.full((DIM_BLOCK // 8,), 127.0, tl.float32)))
    block_scale = tl.broadcast_to(_scale_of(block_code)[:, None], (DIM_BLOCK // 8, 8))
    block_scale = tl.reshape(block_scale, (DIM_BLOCK,))
    whole = tl.minimum(tl.maximum(tl.div_rn(base, block_scale), -127.0), 127.0)
    # Adding this constant leaves no bits for a fraction, which rounds to the nearest, ties to even.
    whole = (whole + 12582912.0) - 12582912.0
    base = whole * block_scale
    out = sketch_data + target * stride_out_page + head * stride_out_head
    tl.store(out + dim, (whole.to(tl.int32) & 255).to(tl.uint8), mask=there)
    block = tl.arange(0, DIM_BLOCK // 8)
    scales = out + DIM + COUNT * CODE_BYTES
    tl.store(scales + block, block_code.to(tl.uint8), mask=block < BLOCKS)
    if COUNT > 0:
        code = _scale_code(tl.maximum(high - base, base - low) * 0.5)
        scale = _scale_of(code)
        bits = chosen.to(tl.int32)
        place = tl.cumsum(bits, 0) - 1
        mask = tl.sum(tl.reshape(bits << (dim % 8), (DIM_BLOCK // 8, 8)), axis=1)
        tl.store(scales + BLOCKS + block, mask.to(tl.uint8), mask=block < BLOCKS)
        tl.store(scales + 2 * BLOCKS + place, code.to(tl.uint8), mask=chosen)
        tokens = tl.where(chosen, SIZE, 0)
        for byte in range(CODE_BYTES):
            packed = tl.zeros((DIM_BLOCK,), tl.int32)
            for i in range(4):
                token = byte * 4 + i
                seen = token < tokens
                x = tl.load(source + token * stride_token, mask=seen, other=0.0).to(tl.float32)
                offset = x - base
                step = (offset >= -scale).to(tl.int32) + (offset >= 0.0).to(tl.int32)
                step += (offset >= scale).to(tl.int32)
                packed |= tl.where(seen, step, 0) << (2 * i)
            at = out + DIM + place * CODE_BYTES + byte
            tl.store(at, packed.to(tl.uint8), mask=chosen)
    else:
        tl.store(scales + BLOCKS + block, tl.zeros_like(block).to(tl.uint8), mask=block < BLOCKS)
    end = DIM + COUNT * CODE_BYTES + 2 * BLOCKS + COUNT
    rest = end + tl.arange(0, 4)
    tl.store(out + rest, tl.zeros_like(rest).to(tl.uint8), mask=rest < NUM_BYTES)


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
    _outline_kernel[(triton.cdiv(width, _PAGES), kv_heads * parts, batch)](
        query.contiguous(),
        (outlines, *outlines.stride()[:2]),
        (host_page_table, *host_page_table.stride()),
        num_pages,
        scores,
        width,
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
def _outline_kernel(
    query,  # [B, Hq, D]
    outlines,  # [host pages, Hkv, bytes], and its strides of pages and heads
    host_page_table,  # [B, P], and its strides
    num_pages,  # [B]
    scores,  # [B, Hq, P]
    width,
    q_heads,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    PAGES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    outline_data, stride_page, stride_head = outlines
    table, stride_table, stride_entry = host_page_table
    head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    request = tl.program_id(2).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    count = tl.load(num_pages + request)
    # A captured step has programs for the longest context.
    if tl.program_id(0) * PAGES >= count:
        return
    present = page < count
    entry = table + request * stride_table + page * stride_entry
    host_page = tl.load(entry, mask=present, other=0).to(tl.int64)
    source = (outline_data + host_page * stride_page + head * stride_head)[:, None]
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
    there = (member < GROUP)[None, :] & present[:, None]
    tl.store(scores + row[None, :] * width + page[:, None], products, mask=there)
