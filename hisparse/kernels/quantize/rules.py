"""How keys and values in eight bits are scaled, and the bytes of latents."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS

__all__ = [
    "FRACTION_BITS",
    "QUANTIZED",
    "RULES",
    "STORED",
    "LatentRow",
    "ScaleRule",
    "check_scales",
]

#: Bits of a float32 are its exponent, biased by 127, and 23 bits of fraction.
FRACTION_BITS = 23


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
    torch.float8_e4m3fn: ScaleRule((1 << FRACTION_BITS) - 0x580000, 8, 112, 61440.0),
    # From 127.5 / 64 on: in [63.75, 127.5).
    torch.int8: ScaleRule((1 << FRACTION_BITS) - 0x7F0000, 6, 103, 65024.0),
}
#: Dtypes of keys and values that have scales: float8_e4m3fn and int8.
QUANTIZED = tuple(RULES)
#: What stored keys and values may be.
STORED = (*FLOATS, *QUANTIZED)


class LatentRow(NamedTuple):
    """Bytes of a token's latent in eight bits, in the order of DeepSeek's ``fp8_ds_mla``.

    Codes ``[rank] float8_e4m3fn``, scales ``[tiles] float32``, rotary channels ``[rope] bfloat16``,
    padding. For 512 and 64 channels: 512 + 16 + 128 = 656 bytes.

    Attributes:
        rank: channels of the latent, which is the value.
        rope: rotary channels, which belong to the key alone.
    """

    rank: int
    rope: int

    @property
    def width(self) -> int:
        """Channels of a key."""
        return self.rank + self.rope

    @property
    def tile(self) -> int:
        """Channels that share a scale: 128, or the largest power of two that divides the rank."""
        return math.gcd(self.rank, 128)

    @property
    def num_tiles(self) -> int:
        """Scales of a token."""
        return self.rank // self.tile

    @property
    def scales_at(self) -> int:
        """Byte at which the scales begin."""
        return -(-self.rank // 4) * 4

    @property
    def rope_at(self) -> int:
        """Byte at which the rotary channels begin."""
        return self.scales_at + 4 * self.num_tiles

    @property
    def end(self) -> int:
        """Byte after the rotary channels."""
        return self.rope_at + 2 * self.rope

    @property
    def num_bytes(self) -> int:
        """Bytes of a token, a multiple of 16: transfers move 16 bytes at once."""
        return -(-self.end // 16) * 16


def check_scales(name: str, stored: Tensor, scales: Tensor | None) -> None:
    """Raise ``KernelError`` unless dtypes in eight bits have scales, and no other dtype has.

    Args:
        name: of the scales, for the message.
        stored: what they scale.
        scales: the scales, if any.
    """
    needed = stored.dtype in QUANTIZED
    if needed != (scales is not None):
        got, expected = ("None", "them") if needed else ("them", "None")
        raise KernelError(f"{name}: got {got}, expected {expected} for {stored.dtype}")
