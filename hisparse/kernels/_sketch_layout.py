"""Where the parts of a page's sketch lie in its bytes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SketchLayout"]

#: Channels of the mean that share a scale.
BLOCK = 8


class SketchLayout(NamedTuple):
    """The bytes of one page and KV head.

    A page's keys ``k_t`` are kept as ``mean + sum_r coordinates[t, r] * directions[r]``, in order:

    - mean: ``[D] int8``, to be multiplied by the scale of its block of 8 channels;
    - directions: ``[R / 2, D] uint8``, two directions in a byte: the even one in the low four
      bits, the odd one in the high four, each plus 8;
    - coordinates: ``[R / 2, S] uint8``, packed in the same way;
    - scales: ``[ceil(D / 8)] uint8`` of the mean's blocks, then ``[R] uint8`` of the directions:
      unsigned floats with five bits of exponent and three of fraction, 2^-20 for 0.

    Attributes:
        dim: D, width of a key.
        page_size: S, tokens.
        num_directions: R, even.
    """

    dim: int
    page_size: int
    num_directions: int

    @property
    def pairs(self) -> int:
        """Directions are packed two by two."""
        return self.num_directions // 2

    @property
    def blocks(self) -> int:
        """Scales of the mean."""
        return -(-self.dim // BLOCK)

    @property
    def coordinates(self) -> int:
        """Where the coordinates begin; the directions begin at D."""
        return self.dim * (1 + self.pairs)

    @property
    def scales(self) -> int:
        """Where the scales begin."""
        return self.coordinates + self.pairs * self.page_size

    @property
    def num_bytes(self) -> int:
        """Of the whole, a multiple of 16 so that rows can be read 16 bytes at a time."""
        return -(-(self.scales + self.blocks + self.num_directions) // 16) * 16
