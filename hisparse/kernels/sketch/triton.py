"""Sketches of pages in Triton, the reference's bytes, and scores of outlines."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.sketch.layout import MOST_SCALE, SCALE_OFFSET, SketchLayout
from hisparse.kernels.triton_common import existing, programs_of, require_dense_rows

#: Smallest sizes of a matrix product, for outlines.
_PAGES = 16
_MOST_QUERIES = 16
_CHANNELS = 32
#: Bytes of codes that a program stores at once: all of an MLA page's take too many registers.
_CODES = 1024
_OFFSET, _MOST = tl.constexpr(SCALE_OFFSET), tl.constexpr(MOST_SCALE)


class _SketchConstants(NamedTuple):
    """What the kernel that stores sketches is compiled for."""

    size: int  # S, tokens of a page
    dim: int  # D, width of a key
    dim_block: int  # the same, rounded up to a power of two
    channels: int  # N, the detailed ones
    blocks: int  # bytes of the block scales
    code_bytes: int  # bytes of the codes of 16 tokens
    codes_step: int  # bytes of codes that are stored at once, a power of two
    first_byte: int  # the first channel whose codes are bytes of a lane
    codes_at: int  # offset of the codes
    scales_at: int  # offset of the channel scales
    channels_at: int  # offset of the numbers of the detailed channels
    channel_width: int  # bytes of each number
    blocks_at: int  # offset of the block scales
    num_bytes: int  # of a sketch


class _OutlineConstants(NamedTuple):
    """What the kernel that scores outlines is compiled for."""

    group: int  # query heads of a KV head
    queries: int  # of them that a program serves
    parts: int  # programs that share a group
    pages: int  # that a program scores in a turn
    dim: int  # D, width of a key
    channels: int  # that are multiplied at once
    half: int  # channels of a byte's low bits


def page_sketch(keys: Tensor, sketches: Tensor, host_pages: Tensor, layout: SketchLayout) -> None:
    """See :func:`hisparse.kernels.page_sketch`; one program per page and head."""
    pages, _, heads, _ = keys.shape
    if not layout.numbered:
        raise KernelError("layout: got sketches without numbers, expected numbered ones")
    if pages == 0:
        return
    codes = layout.channel_scales - layout.codes
    _sketch_kernel[(pages, heads)](
        (keys, *keys.stride()),
        (sketches, *sketches.stride()[:2]),
        host_pages.contiguous(),
        sketches.shape[0],
        _SketchConstants(
            size=layout.page_size,
            dim=layout.dim,
            dim_block=max(8, triton.next_power_of_2(layout.dim)),
            channels=layout.num_channels,
            blocks=layout.blocks,
            code_bytes=layout.code_bytes,
            codes_step=min(_CODES, triton.next_power_of_2(max(1, codes))),
            first_byte=layout.first_byte,
            codes_at=layout.codes,
            scales_at=layout.channel_scales,
            channels_at=layout.channels,
            channel_width=layout.channel_width,
            blocks_at=layout.block_scales,
            num_bytes=layout.num_bytes,
        ),
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
    const: tl.constexpr,
):
    key_data, stride_page, stride_token, stride_head, stride_dim = keys
    sketch_data, stride_out_page, stride_out_head = sketches
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(host_pages + page).to(tl.int64)
    if target <= 0 or target >= num_host_pages:
        return
    dim = tl.arange(0, const.dim_block)
    there = dim < const.dim
    source = key_data + page * stride_page + head * stride_head
    column = source + dim * stride_dim
    high = tl.load(column, mask=there, other=0.0).to(tl.float32)
    low, total = high, high
    for t in range(1, const.size):
        x = tl.load(column + t * stride_token, mask=there, other=0.0).to(tl.float32)
        high, low, total = tl.maximum(high, x), tl.minimum(low, x), total + x
    base = tl.div_rn(total, tl.full(total.shape, const.size, tl.float32))
    if const.channels > 0:
        chosen = _widest(high, low, there, const.channels)
        base = tl.where(chosen, high * 0.5 + low * 0.5, base)
    block_code, whole, base = _rounded_base(base, const)
    out = sketch_data + target * stride_out_page + head * stride_out_head
    for start in range(0, const.num_bytes, const.dim_block):
        zero = tl.zeros_like(dim).to(tl.uint8)
        tl.store(out + start + dim, zero, mask=start + dim < const.num_bytes)
    tl.debug_barrier()  # What other threads write follows.
    tl.store(out + dim, (whole.to(tl.int32) & 255).to(tl.uint8), mask=there)
    block = tl.arange(0, const.dim_block // 8)
    tl.store(out + const.blocks_at + block, block_code.to(tl.uint8), mask=block < const.blocks)
    if const.channels > 0:
        scale_code = _scale_code(tl.maximum(high - base, base - low) * 0.5)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + const.scales_at + place, scale_code.to(tl.uint8), mask=chosen)
        number = out + const.channels_at + place * const.channel_width
        tl.store(number, (dim & 255).to(tl.uint8), mask=chosen)
        if const.channel_width == 2:
            tl.store(number + 1, (dim >> 8).to(tl.uint8), mask=chosen)
        tl.debug_barrier()  # The codes are found with what is stored.
        for begin in range(0, const.scales_at - const.codes_at, const.codes_step):
            _store_codes((source, stride_token, stride_dim), out, begin, const)


@triton.jit
def _rounded_base(base, const: tl.constexpr):
    """The code of each block's scale, ``[blocks]``; base values over it, and as they are stored."""
    DIM: tl.constexpr = const.dim_block
    BLOCKS: tl.constexpr = DIM // 8
    top = tl.max(tl.reshape(tl.abs(base), (BLOCKS, 8)), axis=1)
    code = _scale_code(tl.div_rn(top, tl.full((BLOCKS,), 127.0, tl.float32)))
    scale = tl.reshape(tl.broadcast_to(_scale_of(code)[:, None], (BLOCKS, 8)), (DIM,))
    whole = tl.minimum(tl.maximum(tl.div_rn(base, scale), -127.0), 127.0)
    # Adding this constant leaves no bits for a fraction, which rounds to the nearest, ties to even.
    whole = (whole + 12582912.0) - 12582912.0
    return code, whole, whole * scale


@triton.jit
def _store_codes(tokens, out, begin, const: tl.constexpr):
    """Store bytes of codes of the page's ``tokens`` from ``begin`` on; all else of it is there.

    A byte has codes of two channels for two tokens, see ``SketchLayout.code_places``.
    """
    source, stride_token, stride_dim = tokens
    byte = begin + tl.arange(0, const.codes_step)
    inside = byte < const.scales_at - const.codes_at
    own = byte % const.code_bytes
    is_word = own < 4 * const.first_byte
    lane = tl.where(is_word, own // 4, own) % 32
    of_word = own // 128 * 32 + lane % 4 * 8 + own % 2 * 4 + own % 4 // 2
    first = tl.where(is_word, of_word, own // 32 * 8 + lane % 4 * 2)
    packed = tl.zeros_like(byte)
    for i in tl.static_range(2):
        rank = first + i * tl.where(is_word, 2, 1)
        there = inside & (rank < const.channels)
        number = out + const.channels_at + rank * const.channel_width
        channel = tl.load(number, mask=there, other=0).to(tl.int32)
        if const.channel_width == 2:
            channel |= tl.load(number + 1, mask=there, other=0).to(tl.int32) << 8
        code = tl.load(out + const.blocks_at + channel // 8, mask=there, other=0)
        whole = tl.load(out + channel, mask=there, other=0).to(tl.int8, bitcast=True)
        base = whole.to(tl.float32) * _scale_of(code)
        scale = _scale_of(tl.load(out + const.scales_at + rank, mask=there, other=0))
        for half in tl.static_range(2):
            token = byte // const.code_bytes * 16 + lane // 4 + 8 * half
            seen = there & (token < const.size)
            at = source + token * stride_token + channel * stride_dim
            offset = tl.load(at, mask=seen, other=0.0).to(tl.float32) - base
            step = (offset >= -scale).to(tl.int32) + (offset >= 0.0).to(tl.int32)
            step += (offset >= scale).to(tl.int32)
            packed |= tl.where(seen, step, 0) << (4 * i + 2 * half)
    tl.store(out + const.codes_at + byte, packed.to(tl.uint8), mask=inside)


def outline_score(
    query: Tensor, outlines: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.outline_score`; queries of a group share a decoded outline."""
    batch, q_heads, dim = query.shape
    kv_heads, width = outlines.shape[1], host_page_table.shape[1]
    scores = query.new_empty(batch, q_heads, width)
    if scores.numel() == 0:
        return scores
    require_dense_rows(outlines=outlines)
    group = q_heads // kv_heads
    parts = triton.cdiv(group, _MOST_QUERIES)
    programs = programs_of(query.device, triton.cdiv(width, _PAGES), batch, kv_heads * parts)
    _outline_kernel[(programs, kv_heads * parts, batch)](
        query.contiguous(),
        (outlines, *outlines.stride()[:2]),
        (host_page_table, *host_page_table.stride(), num_pages.contiguous()),
        scores,
        (width, q_heads, outlines.shape[0]),
        _OutlineConstants(
            group=group,
            queries=_MOST_QUERIES,
            parts=parts,
            pages=_PAGES,
            dim=dim,
            channels=_CHANNELS,
            half=triton.cdiv(dim, 16) * 8,
        ),
    )
    return scores


@triton.jit
def _outline_kernel(
    query,  # [B, Hq, D]
    outlines,  # [host pages, Hkv, bytes], and its strides of pages and heads
    host_pages,  # [B, P], and its strides; pages of each request [B]
    scores,  # [B, Hq, P]
    shape,  # P, Hq, host pages
    const: tl.constexpr,
):
    outline_data, stride_page, stride_head = outlines
    table, stride_table, stride_entry, num_pages = host_pages
    width, q_heads, num_host_pages = shape
    head, part = tl.program_id(1) // const.parts, tl.program_id(1) % const.parts
    request = tl.program_id(2).to(tl.int64)
    count = tl.minimum(tl.load(num_pages + request), width)
    member = part * const.queries + tl.arange(0, const.queries)
    row = request * q_heads + head * const.group + member
    tiles = tl.cdiv(count, const.pages)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        page = tile * const.pages + tl.arange(0, const.pages)
        present = page < count
        entry = table + request * stride_table + page * stride_entry
        host_page = existing(tl.load(entry, mask=present, other=0), num_host_pages).to(tl.int64)
        source = (outline_data + host_page * stride_page + head * stride_head)[:, None]
        products = tl.zeros((page.shape[0], member.shape[0]), tl.float32)
        for start in range(0, const.dim, const.channels):
            dim = start + tl.arange(0, const.channels)
            there = present[:, None] & (dim < const.dim)[None, :]
            pair = tl.load(source + (dim % const.half)[None, :], mask=there, other=0).to(tl.int32)
            four = (pair >> (dim // const.half * 4)[None, :]) & 15
            value = (four - 16 * (four > 7).to(tl.int32)).to(tl.float32)
            code = tl.load(source + const.half + (dim // 8)[None, :], mask=there, other=0)
            values = 1.4 * value * (tl.abs(value) + 6.0) * _scale_of(code)
            own = (member < const.group)[None, :] & (dim < const.dim)[:, None]
            q = tl.load(query + row[None, :] * const.dim + dim[:, None], mask=own, other=0.0)
            products += tl.dot(values, q, input_precision="ieee")
        there = (member < const.group)[None, :] & present[:, None]
        tl.store(scores + row[None, :] * width + page[:, None], products, mask=there)
