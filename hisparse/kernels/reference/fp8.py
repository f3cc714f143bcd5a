"""Eight-bit keys and values in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.types import StoredKV

__all__ = ["decode_fp8", "encode_fp8", "read_scales"]

#: Bits of a float32 are its exponent, biased by 127, and 23 bits of fraction.
_FRACTION_BITS = 23
#: Added to a float's bits, it carries into the exponent if the fraction is 1.6875 or more. So the
#: largest magnitude of a scaled vector is in [216, 432). Both bounds lie halfway between two
#: numbers of e4m3: rounding stays inside, and a decoded vector gets the same scale again.
_CARRY = (1 << _FRACTION_BITS) - 0x580000
#: Exponent of the largest magnitude, minus its exponent after scaling.
_SHIFT = 8
#: 240 * 2 ** 8: the next number under that scale, 256 * 2 ** 8, is beyond float16.
_LARGEST_HALF = 61440.0
#: 2 ** -15: scales the least number of e4m3 to the least of float16.
_LEAST_SCALE = 112
_BIAS = 127


def encode_fp8(k: Tensor, v: Tensor) -> StoredKV:
    """See :func:`hisparse.kernels.encode_fp8`."""
    (k, k_scales), (v, v_scales) = map(_encode, (k, v))
    return StoredKV(k, v, torch.stack([k_scales, v_scales], dim=-1))


def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float16:
        x = x.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    largest = x.abs().amax(-1).float().view(torch.int32)
    scale = (((largest + _CARRY) >> _FRACTION_BITS) - _SHIFT).clamp(min=_LEAST_SCALE)
    inverse = ((2 * _BIAS - scale) << _FRACTION_BITS).view(torch.float32)
    codes = (x.float() * inverse[..., None]).to(torch.float8_e4m3fn)
    return codes.contiguous(), scale.to(torch.uint8)


def decode_fp8(stored: StoredKV, out: tuple[Tensor, Tensor]) -> None:
    """See :func:`hisparse.kernels.decode_fp8`."""
    assert stored.scales is not None, "checked by the entry point"
    scales = read_scales(stored.scales)
    for which, (codes, to) in enumerate(zip(stored.kv, out, strict=True)):
        # The scale is a power of two: nothing is rounded in any of the dtypes.
        to.copy_(codes).mul_(scales[..., which, None].to(to.device, to.dtype))


def read_scales(scales: Tensor) -> Tensor:
    """``[..., 2] uint8`` -> ``[..., 2] float32``."""
    return (scales.to(torch.int32) << _FRACTION_BITS).view(torch.float32)
