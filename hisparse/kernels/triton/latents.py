"""Latents in eight bits in Triton: codes by ``quantize``, pages decoded in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.latent_row import LatentRow
from hisparse.kernels.reference.latents import pack_latents
from hisparse.kernels.triton.quantize import quantize

__all__ = ["decode_latents", "encode_latents"]

#: Elements of a program.
_ELEMENTS = 4096


def encode_latents(latents: Tensor, row: LatentRow) -> Tensor:
    """See :func:`hisparse.kernels.encode_latents`."""
    tiles = latents[..., : row.rank].unflatten(-1, (row.num_tiles, row.tile))
    stored = quantize(tiles, tiles[..., :1], torch.float8_e4m3fn)
    assert stored.scales is not None, "quantize returns scales"
    return pack_latents(latents, stored.k, stored.scales[..., 0], row)


def decode_latents(pages: Tensor, table: Tensor, row: LatentRow, out: Tensor) -> None:
    """See :func:`hisparse.kernels.decode_latents`."""
    count, size = table.shape[0], pages.shape[1]
    if count * size == 0:
        return
    block = triton.next_power_of_2(row.rank)
    tokens = max(1, _ELEMENTS // block)
    _decode_kernel[(triton.cdiv(count * size, tokens),)](
        pages,
        table.contiguous(),
        out,
        *pages.stride()[:2],
        count * size,
        RANK=row.rank,
        RANK_BLOCK=block,
        TILE=row.tile,
        ROPE=row.rope,
        ROPE_BLOCK=max(1, triton.next_power_of_2(row.rope)),
        SCALES_AT=row.scales_at,
        ROPE_AT=row.rope_at,
        SIZE=size,
        TOKENS=tokens,
    )


@triton.jit
def _decode_kernel(
    pages,  # [N, S, bytes]
    table,  # [n]
    out,  # [n, S, rank + rope]
    stride_page,
    stride_token,
    count,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token < count
    page = tl.load(table + token // SIZE, mask=live, other=-1).to(tl.int64)
    live = live & (page >= 0)
    source = pages + page * stride_page + token % SIZE * stride_token
    target = out + token * (RANK + ROPE)
    dim = tl.arange(0, RANK_BLOCK)
    seen = live[:, None] & (dim < RANK)[None, :]
    codes = tl.load(source[:, None] + dim[None, :], mask=seen, other=0)
    # A float32 that is 2 ** -120 times the code: the difference of the exponents' biases.
    bits = codes.to(tl.int32)
    numbers = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    # A scale lies at a multiple of four bytes.
    scale = (source + SCALES_AT).to(tl.pointer_type(tl.float32))
    factor = tl.load(scale[:, None] + (dim // TILE)[None, :], mask=seen, other=0.0)
    # NaN has no number: its code has all bits set.
    nan = (bits & 0x7F) == 0x7F
    numbers = tl.where(nan, float("nan"), numbers * 2.0**120 * factor)
    tl.store(target[:, None] + dim[None, :], numbers.to(out.dtype.element_ty), mask=seen)
    if ROPE > 0:
        part = tl.arange(0, ROPE_BLOCK)
        shown = live[:, None] & (part < ROPE)[None, :]
        halves = (source + ROPE_AT).to(tl.pointer_type(tl.int16))
        raw = tl.load(halves[:, None] + part[None, :], mask=shown, other=0).to(tl.int32)
        rope = (raw << 16).to(tl.float32, bitcast=True)
        tl.store(
            target[:, None] + (RANK + part)[None, :], rope.to(out.dtype.element_ty), mask=shown
        )
