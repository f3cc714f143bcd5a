"""Eight-bit keys, values and latents in plain PyTorch: the oracle of the other implementations."""

import torch
from torch import Tensor

from hisparse.kernels.quantize.op import FRACTION_BITS, RULES, LatentRow
from hisparse.types import StoredKV

_BIAS = 127
#: Its bits in float32.
_INFINITY = 0x7F800000
#: The next number of bfloat16 is beyond float16.
_LARGEST_HALF = 65280.0


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype) -> StoredKV:
    """See :func:`hisparse.kernels.quantize`."""
    (k, k_scales), (v, v_scales) = (_quantize(x, dtype) for x in (k, v))
    return StoredKV(k, v, torch.stack([k_scales, v_scales], dim=-1))


def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rule = RULES[dtype]
    if x.dtype == torch.float16:
        x = x.clamp(-rule.largest_half, rule.largest_half)
    # A NaN has any fraction; the bits of infinity leave room for the carry.
    largest = x.abs().amax(-1).float().view(torch.int32).clamp(max=_INFINITY)
    scale = (((largest + rule.carry) >> FRACTION_BITS) - rule.exponent).clamp(min=rule.least_scale)
    inverse = ((2 * _BIAS - scale) << FRACTION_BITS).view(torch.float32)
    codes = x.float() * inverse[..., None]
    if dtype == torch.int8:
        codes = codes.round_().clamp_(-127, 127).nan_to_num_(0.0)
    else:
        # Some versions of PyTorch make NaN of infinity.
        most = torch.finfo(dtype).max
        codes = codes.clamp_(-most, most)
    return codes.to(dtype).contiguous(), scale.to(torch.uint8)


def dequantize(stored: StoredKV, out: tuple[Tensor, Tensor]) -> None:
    """See :func:`hisparse.kernels.dequantize`."""
    assert stored.scales is not None, "checked by the entry point"
    scales = read_scales(stored.scales)
    for which, (codes, to) in enumerate(zip(stored.kv, out, strict=True)):
        # The scale is a power of two: nothing is rounded in any of the dtypes.
        to.copy_(codes).mul_(scales[..., which, None].to(to.device, to.dtype))


def read_scales(scales: Tensor) -> Tensor:
    """``[..., 2] uint8`` -> ``[..., 2] float32``."""
    return (scales.to(torch.int32) << FRACTION_BITS).view(torch.float32)


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


def decode_latents(pages: Tensor, table: Tensor, out: Tensor, row: LatentRow) -> None:
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
