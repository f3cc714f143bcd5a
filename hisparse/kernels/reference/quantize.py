"""Eight-bit keys and values in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.types import StoredKV

__all__ = ["RULES", "ScaleRule", "dequantize", "quantize", "read_scales"]

#: Bits of a float32 are its exponent, biased by 127, and 23 bits of fraction.
_FRACTION_BITS = 23
_BIAS = 127


class ScaleRule(NamedTuple):
    """How the scale of a vector follows from its largest magnitude.

    Attributes:
        carry: added to a float's bits, it carries into the exponent from some fraction on. So the
            largest magnitude of a scaled vector stays below twice the least that it can be. Both
            bounds lie halfway between two numbers of the dtype: rounding stays inside, and a
            decoded vector gets the same scale again.
        exponent: of the largest magnitude after scaling, where ``carry`` does not carry.
        least_scale: scales the least number of the dtype to that of float16, 2 ** -24.
        largest_half: the largest of float16 that is stored; the next number under its scale is
            beyond float16.
    """

    carry: int
    exponent: int
    least_scale: int
    largest_half: float


RULES = {
    # Fractions from 1.6875 on carry: the largest magnitude is in [216, 432).
    torch.float8_e4m3fn: ScaleRule((1 << _FRACTION_BITS) - 0x580000, 8, 112, 61440.0),
    # From 127.5 / 64 on: in [63.75, 127.5).
    torch.int8: ScaleRule((1 << _FRACTION_BITS) - 0x7F0000, 6, 103, 65024.0),
}


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype) -> StoredKV:
    """See :func:`hisparse.kernels.quantize`."""
    (k, k_scales), (v, v_scales) = (_quantize(x, dtype) for x in (k, v))
    return StoredKV(k, v, torch.stack([k_scales, v_scales], dim=-1))


def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rule = RULES[dtype]
    if x.dtype == torch.float16:
        x = x.clamp(-rule.largest_half, rule.largest_half)
    largest = x.abs().amax(-1).float().view(torch.int32)
    scale = (((largest + rule.carry) >> _FRACTION_BITS) - rule.exponent).clamp(min=rule.least_scale)
    inverse = ((2 * _BIAS - scale) << _FRACTION_BITS).view(torch.float32)
    codes = x.float() * inverse[..., None]
    if dtype == torch.int8:
        codes = codes.round_().clamp_(-127, 127).nan_to_num_(0.0)
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
    return (scales.to(torch.int32) << _FRACTION_BITS).view(torch.float32)
