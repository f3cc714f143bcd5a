"""The bytes of a token's latent in eight bits."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["LatentRow"]


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
        """Byte behind the rotary channels."""
        return self.rope_at + 2 * self.rope

    @property
    def num_bytes(self) -> int:
        """Bytes of a token, a multiple of 16: transfers move 16 bytes at once."""
        return -(-self.end // 16) * 16
