"""Bytes of sketches and outlines; `csrc/include/hisparse/sketch_layout.h` has the same offsets."""

from typing import NamedTuple

import torch
from torch import Tensor

#: Channels whose base values share a scale.
BLOCK = 8
#: A scale's byte plus this offset, shifted to bit 20, is the scale as a float32: five bits of
#: exponent and three of fraction, from 2^-20 on.
SCALE_OFFSET = 107 << 3
#: The largest code, that of 1,920: CUDA multiplies scales as float16 numbers. So numbers of a key
#: are kept up to 243,840, and taken as that beyond.
MOST_SCALE = 247


class SketchLayout(NamedTuple):
    """The bytes of one page and KV head, in this order.

    - ``base [D] int8``, multiplied by the scale of its block of 8 channels;
    - codes: for each detailed channel two bits a token; a code c stands for (c - 1.5) times the
      channel's scale, on top of the base;
    - ``channel scales [N] uint8``, of the detailed channels, ascending;
    - which channels these are: ``mask [ceil(D / 8)] uint8``, a bit for each channel, or, if
      ``numbered``, their numbers, uint8 up to a width of 256, else uint16;
    - ``block scales [ceil(D / 8)] uint8``.

    Zeros follow, up to a multiple of 4 bytes, or of the 16 that GPUs copy at a time.

    CPUs read ``codes [N, ceil(S / 4)] uint8``, the first token lowest. If numbered, codes begin at
    a multiple of 16 bytes, numbers at one of 4, and codes lie as a warp's lanes multiply them
    (``mma.m16n8k16``), each of which reads its own: see :meth:`code_places`.

    With four bits every channel is detailed, and a code c stands for (c - 7.5) times the scale. The
    order is: base, channel scales, block scales, codes. CPUs alone read it.

    Attributes:
        dim: D, width of a key.
        page_size: S, tokens.
        num_channels: N, channels with codes, the detailed ones.
        numbered: whether GPUs read it; else CPUs do.
        bits: of a code, 2 or 4.
    """

    dim: int
    page_size: int
    num_channels: int
    numbered: bool = True
    bits: int = 2

    @property
    def blocks(self) -> int:
        """Bytes of the block scales, and of the mask."""
        return -(-self.dim // BLOCK)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes: of 16 tokens, if numbered or of four bits, else of one channel."""
        if self.bits == 4:
            return 64 * self.blocks
        return 4 * _round_up(self.num_channels, 8) if self.numbered else -(-self.page_size // 4)

    @property
    def first_byte(self) -> int:
        """Of a numbered sketch: the first channel whose codes are bytes of a lane, not words."""
        return self.code_bytes // 128 * 32

    @property
    def codes(self) -> int:
        """Offset of the codes."""
        if self.bits == 4:
            return 2 * self.dim + self.blocks
        return _round_up(self.dim, 16) if self.numbered else self.dim

    @property
    def channel_scales(self) -> int:
        """Offset of the channel scales."""
        if self.bits == 4:
            return self.dim
        rows = -(-self.page_size // 16) if self.numbered else self.num_channels
        return self.codes + rows * self.code_bytes

    @property
    def channels(self) -> int:
        """Offset of the channels' numbers, or of the mask."""
        return _round_up(self.channel_scales + self.num_channels, 4 if self.numbered else 1)

    @property
    def channel_width(self) -> int:
        """Bytes of a channel's number; 0: there is a mask."""
        return 0 if not self.numbered else 1 if self.dim <= 256 else 2

    @property
    def block_scales(self) -> int:
        """Offset of the block scales."""
        if self.bits == 4:
            return 2 * self.dim
        size = self.num_channels * self.channel_width if self.numbered else self.blocks
        return self.channels + size

    @property
    def num_bytes(self) -> int:
        """Bytes of a sketch."""
        if self.bits == 4:
            return _round_up(self.codes + -(-self.page_size // 16) * self.code_bytes, 4)
        # GPUs read numbers of 8 channels where fewer are left.
        read = self.channels + _round_up(self.num_channels, 8) * self.channel_width
        return _round_up(max(self.block_scales + self.blocks, read), 16 if self.numbered else 4)

    def code_places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the codes are: offsets ``[N, S] int64`` of their bytes, and of their first bits.

        If numbered, lane 4g + t of a warp has the codes of tokens g and g + 8 of each 16 tokens, in
        32 bits for every 32 channels, 8t to 8t + 7 of them, and in 8 bits for each 8 channels that
        are left, 2t and 2t + 1 of them. Bits of a channel of odd number are those of the one before
        it, moved by half a word or byte.

        With four bits, 64 bytes have the codes of 8 channels for 16 tokens, 4 bytes a token, in the
        order 0, 4, 8, 12, 1, 5 and so on. The last four channels have the high bits.
        """
        channel = torch.arange(self.num_channels, device=device)[:, None]
        token = torch.arange(self.page_size, device=device)
        if self.bits == 4:
            place = token % 4 * 4 + token % 16 // 4
            offset = token // 16 * self.code_bytes + channel // BLOCK * 64 + place * 4
            return self.codes + offset + channel % 4, (channel % BLOCK // 4 * 4).expand_as(offset)
        if not self.numbered:
            offset = self.codes + channel * self.code_bytes + token // 4
            return offset, (token % 4 * 2).expand_as(offset)
        words = (channel < self.first_byte).long()
        size = 1 + 3 * words  # bytes of a lane
        lane = token % 8 * 4 + torch.where(words > 0, channel % 32 // 8, channel % 8 // 2)
        bit = token % 16 // 8 * 2 + channel % 2 * 4 * size + words * (channel % 8 // 2 * 4)
        offset = self.codes + token // 16 * self.code_bytes + channel // (8 * size) * 32 * size
        return offset + lane * size + bit // 8, bit % 8


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def outline_bytes(dim: int) -> int:
    """Bytes of the outline of a page and KV head with keys of width ``dim``.

    - ``codes [half] uint8``, half the width rounded up to whole blocks of 8 channels: byte i has
      channel i in its low four bits, and channel half + i in its high ones. Four bits are a signed
      number v, -7 to 7, and stand for ``1.4 * v * (abs(v) + 6)`` times the scale of the block: the
      steps grow with the value, since most blocks have a channel that is far above the others;
    - ``block scales [ceil(D / 8)] uint8``, those of the page's sketch.
    """
    return -(-dim // (2 * BLOCK)) * BLOCK - (-dim // BLOCK)
