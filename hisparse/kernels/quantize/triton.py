"""Eight-bit keys, values and latents in Triton.

A launch serves the keys of a step and another one its values; pages of latents are decoded in one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.quantize.op import RULES, LatentRow
from hisparse.kernels.quantize.reference import pack_latents
from hisparse.kernels.triton_common import require_dense_rows
from hisparse.types import StoredKV

#: Elements of a program; small, so that a step's few vectors make many programs.
_ELEMENTS = 1024
#: The same where latents are decoded.
_DECODED = 4096


class _QuantizeConstants(NamedTuple):
    """What the kernel that encodes is compiled for, beside a dtype's ``ScaleRule``."""

    width: int  # D, of a vector
    width_block: int  # the same, rounded up to a power of two
    vectors: int  # of a program


class _DecodeConstants(NamedTuple):
    """What the kernel that decodes latents is compiled for."""

    rank: int  # of a latent, its first numbers
    rank_block: int  # the same, rounded up to a power of two
    tile: int  # numbers that share a scale
    rope: int  # numbers after the rank, in bfloat16
    rope_block: int  # the same, rounded up to a power of two
    scales_at: int  # offset of a row's scales, in bytes
    rope_at: int  # offset of its numbers in bfloat16, in bytes
    size: int  # S, tokens of a page
    tokens: int  # of a program


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype) -> StoredKV:
    """See :func:`hisparse.kernels.quantize`."""
    scales = torch.empty((*k.shape[:-1], 2), dtype=torch.uint8, device=k.device)
    codes = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v)]
    for which, (x, to) in enumerate(zip((k, v), codes, strict=True)):
        vectors = x.reshape(-1, *x.shape[-2:])
        vectors = vectors if vectors.stride(-1) == 1 else vectors.contiguous()
        count, width = vectors.shape[0] * vectors.shape[1], vectors.shape[2]
        if count == 0:
            continue
        block = triton.next_power_of_2(width)
        step = max(1, _ELEMENTS // block)
        _quantize_kernel[(triton.cdiv(count, step),)](
            (vectors, *vectors.stride()[:2]),
            # As bytes, because some GPUs that Triton compiles for do not have e4m3.
            to if dtype == torch.int8 else to.view(torch.uint8),
            scales,
            (vectors.shape[1], count),
            which,
            RULES[dtype],
            _QuantizeConstants(width=width, width_block=block, vectors=step),
        )
    return StoredKV(codes[0], codes[1], scales)


@triton.jit
def to_e4m3(x):
    """Round to e4m3, ties to even; ``x`` is below 432, infinite or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    positive = bits & 0x7FFFFFFF
    # Drops 20 bits of the fraction; 120 is the difference of the exponents' biases.
    normal = (positive - (120 << 23) + 0x7FFFF + ((positive >> 20) & 1)) >> 20
    # Subnormal ones are multiples of 2 ** -9: so are all numbers next to 2 ** 14.
    beside = positive.to(tl.float32, bitcast=True) + 16384.0
    subnormal = beside.to(tl.int32, bitcast=True) - (141 << 23)
    number = tl.where(positive < (121 << 23), subnormal, normal)
    beyond = tl.where(positive > 0x7F800000, 0x7F, 0x7E)  # NaN, infinity
    number = tl.where(positive < 0x7F800000, number, beyond)
    return (((bits >> 24) & 0x80) | number).to(tl.uint8)


@triton.jit
def _to_int8(x):
    """Round to integers, ties to even, of magnitudes up to 127; NaN becomes 0."""
    x = tl.where(x > 127.0, 127.0, tl.where(x < -127.0, -127.0, tl.where(x == x, x, 0.0)))
    # Adding 3 * 2 ** 22 leaves no bits for a fraction; the integer stands in the low bits.
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def _quantize_kernel(
    vectors,  # [T, H, D], and its strides of tokens and heads
    codes,  # [T, H, D]
    scales,  # [T, H, 2]
    shape,  # H, and T * H
    which,  # of the two scales
    rule: tl.constexpr,
    const: tl.constexpr,
):
    data, stride_token, stride_head = vectors
    heads, count = shape
    vector = tl.program_id(0).to(tl.int64) * const.vectors + tl.arange(0, const.vectors)
    dim, live = tl.arange(0, const.width_block), vector < count
    seen = live[:, None] & (dim < const.width)[None, :]
    place = data + vector // heads * stride_token + vector % heads * stride_head
    x = tl.load(place[:, None] + dim[None, :], mask=seen, other=0.0).to(tl.float32)
    if data.dtype.element_ty == tl.float16:
        # Not tl.clamp, which would not keep NaN.
        x = tl.where(x < -rule.largest_half, -rule.largest_half, x)
        x = tl.where(x > rule.largest_half, rule.largest_half, x)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    # See op.py. A GPU makes NaN with the largest fraction, to which nothing can be added.
    largest = tl.minimum(largest, 0x7F800000)
    scale = tl.maximum(((largest + rule.carry) >> 23) - rule.exponent, rule.least_scale)
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    place = codes + vector * const.width
    x *= inverse[:, None]
    if codes.dtype.element_ty == tl.int8:
        codes_of = _to_int8(x)
    else:
        tl.static_assert(rule.exponent == 8, "no code but that of float8_e4m3fn")
        codes_of = to_e4m3(x)
    tl.store(place[:, None] + dim[None, :], codes_of, mask=seen)
    tl.store(scales + vector * 2 + which, scale.to(tl.uint8), mask=live)


def encode_latents(latents: Tensor, row: LatentRow) -> Tensor:
    """See :func:`hisparse.kernels.encode_latents`."""
    tiles = latents[..., : row.rank].unflatten(-1, (row.num_tiles, row.tile))
    stored = quantize(tiles, tiles[..., :1], torch.float8_e4m3fn)
    assert stored.scales is not None, "quantize returns scales"
    return pack_latents(latents, stored.k, stored.scales[..., 0], row)


def decode_latents(pages: Tensor, table: Tensor, out: Tensor, row: LatentRow) -> None:
    """See :func:`hisparse.kernels.decode_latents`."""
    count, size = table.shape[0], pages.shape[1]
    if count * size == 0:
        return
    require_dense_rows(pages=pages)
    block = triton.next_power_of_2(row.rank)
    tokens = max(1, _DECODED // block)
    _decode_kernel[(triton.cdiv(count * size, tokens),)](
        (pages, *pages.stride()[:2]),
        table.contiguous(),
        out,
        (count * size, pages.shape[0]),
        _DecodeConstants(
            rank=row.rank,
            rank_block=block,
            tile=row.tile,
            rope=row.rope,
            rope_block=max(1, triton.next_power_of_2(row.rope)),
            scales_at=row.scales_at,
            rope_at=row.rope_at,
            size=size,
            tokens=tokens,
        ),
    )


@triton.jit
def _decode_kernel(
    pages,  # [N, S, bytes], and its strides of pages and tokens
    table,  # [n]
    out,  # [n, S, rank + rope]
    shape,  # n * S, N
    const: tl.constexpr,
):
    data, stride_page, stride_token = pages
    count, num_pages = shape
    token = tl.program_id(0).to(tl.int64) * const.tokens + tl.arange(0, const.tokens)
    live = token < count
    page = tl.load(table + token // const.size, mask=live, other=-1).to(tl.int64)
    live = live & (page >= 0) & (page < num_pages)
    source = data + page * stride_page + token % const.size * stride_token
    target = out + token * (const.rank + const.rope)
    dim = tl.arange(0, const.rank_block)
    seen = live[:, None] & (dim < const.rank)[None, :]
    codes = tl.load(source[:, None] + dim[None, :], mask=seen, other=0)
    # A float32 that is 2 ** -120 times the code: the difference of the exponents' biases.
    bits = codes.to(tl.int32)
    numbers = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    # A scale lies at a multiple of four bytes.
    scale = (source + const.scales_at).to(tl.pointer_type(tl.float32))
    factor = tl.load(scale[:, None] + (dim // const.tile)[None, :], mask=seen, other=0.0)
    # NaN has no number: its code has all bits set.
    nan = (bits & 0x7F) == 0x7F
    numbers = tl.where(nan, float("nan"), numbers * 2.0**120 * factor)
    tl.store(target[:, None] + dim[None, :], numbers.to(out.dtype.element_ty), mask=seen)
    if const.rope > 0:
        part = tl.arange(0, const.rope_block)
        shown = live[:, None] & (part < const.rope)[None, :]
        halves = (source + const.rope_at).to(tl.pointer_type(tl.int16))
        raw = tl.load(halves[:, None] + part[None, :], mask=shown, other=0).to(tl.int32)
        rope = (raw << 16).to(tl.float32, bitcast=True).to(out.dtype.element_ty)
        tl.store(target[:, None] + (const.rank + part)[None, :], rope, mask=shown)
