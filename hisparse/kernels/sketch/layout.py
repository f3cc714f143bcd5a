"""The layout of the bytes of sketches and outlines."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BLOCK", "SCALE_OFFSET", "SketchLayout", "outline_bytes"]

#: Channels whose base values share a scale.
BLOCK = 8
#: A scale's byte plus this offset, shifted to bit 20, is the scale as a float32: five bits of
#: exponent and three of fraction, from 2^-20 on.
SCALE_OFFSET = 107 << 3


class SketchLayout(NamedTuple):
    """The bytes of one page and KV head, in this order.

    - ``base [D] int8``, multiplied by the scale of its block of 8 channels;
    - ``codes [N, ceil(S / 4)] uint8``: for each detailed channel two bits a token, the first token
      lowest; a code c stands for (c - 1.5) times the channel's scale, on top of the base;
    - ``block scales [ceil(D / 8)] uint8``;
    - ``mask [ceil(D / 8)] uint8``: a bit for each channel, set for the detailed ones;
    - ``channel scales [N] uint8``.

    Attributes:
        dim: D, width of a key.
        page_size: S, tokens.
        num_channels: N, channels with codes, the detailed ones.
    """

    dim: int
    page_size: int
    num_channels: int

    @property
    def blocks(self) -> int:
        """Bytes of the block scales, and of the mask."""
        return -(-self.dim // BLOCK)

    @property
    def code_bytes(self) -> int:
        """Bytes of one channel's codes."""
        return -(-self.page_size // 4)

    @property
    def block_scales(self) -> int:
        """Offset of the block scales; the codes begin at D."""
        return self.dim + self.num_channels * self.code_bytes

    @property
    def mask(self) -> int:
        """Offset of the mask."""
        return self.block_scales + self.blocks

    @property
    def channel_scales(self) -> int:
        """Offset of the channel scales."""
        return self.mask + self.blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of a sketch, a multiple of 4."""
        return -(-(self.channel_scales + self.num_channels) // 4) * 4


def outline_bytes(dim: int) -> int:
    """Bytes of the outline of a page and KV head with keys of width ``dim``.

    - ``codes [half] uint8``, half the width rounded up to whole blocks of 8 channels: byte i has
      channel i in its low four bits, and channel half + i in its high ones. Four bits are a signed
      number v, -7 to 7, and stand for ``1.4 * v * (abs(v) + 6)`` times the scale of the block: the
      steps grow with the value, since most blocks have a channel that is far above the others;
    - ``block scales [ceil(D / 8)] uint8``, those of the page's sketch.
    """
    return -(-dim // (2 * BLOCK)) * BLOCK - (-dim // BLOCK)
