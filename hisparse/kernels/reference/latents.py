"""Latents in eight bits in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.latent_row import LatentRow
from hisparse.kernels.reference.quantize import quantize, read_scales

__all__ = ["decode_latents", "encode_latents", "pack_latents"]

#: The next number of bfloat16 is beyond float16.
_LARGEST_HALF = 65280.0


def encode_latents(latents: Tensor, row: LatentRow) -> Tensor:
    """See :func:`hisparse.kernels.encode_latents`."""
    tiles = latents[..., : row.rank].unflatten(-1, (row.num_tiles, row.tile))
    codes, _, scales = quantize(tiles, tiles, torch.float8_e4m3fn)
    assert scales is not None, "quantize returns scales"
    return pack_latents(latents, codes, scales[..., 0], row)


def pack_latents(latents: Tensor, codes: Tensor, scales: Tensor, row: LatentRow) -> Tensor:
    """Rows of encoded tiles.

    Args:
        latents: ``[..., rank + rope]``.
        codes: ``[..., tiles, tile] float8_e4m3fn``.
        scales: ``[..., tiles] uint8``, exponents of powers of two.
        row: the order of the bytes.

    Returns:
        ``[..., num_bytes] uint8``.
    """
    rope = latents[..., row.rank :]
    if rope.dtype == torch.float16:
        rope = rope.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    rows = latents.new_zeros(*latents.shape[:-1], row.num_bytes, dtype=torch.uint8)
    rows[..., : row.rank] = codes.flatten(-2).view(torch.uint8)
    rows[..., row.scales_at : row.rope_at].view(torch.float32).copy_(read_scales(scales))
    rows[..., row.rope_at : row.end].view(torch.bfloat16).copy_(rope)
    return rows


def decode_latents(pages: Tensor, table: Tensor, row: LatentRow, out: Tensor) -> None:
    """See :func:`hisparse.kernels.decode_latents`."""
    rows = pages.index_select(0, table.clamp(min=0))
    codes = rows[..., : row.rank].view(torch.float8_e4m3fn)
    scales = rows[..., row.scales_at : row.rope_at].view(torch.float32)
    out[..., : row.rank] = codes
    # The scales are powers of two: nothing is rounded in any of the dtypes.
    out[..., : row.rank].unflatten(-1, (row.num_tiles, row.tile)).mul_(
        scales.to(out.dtype)[..., None]
    )
    out[..., row.rank :] = rows[..., row.rope_at : row.end].view(torch.bfloat16)
