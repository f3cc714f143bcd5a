"""Keys and values in eight bits, with a power of two as scale for each token and head.

A scale brings a vector into the range of the stored dtype. One byte holds the power of two (E8M0,
as in https://arxiv.org/abs/2310.10537). Decoded values are exact in float32, bfloat16 and float16
alike, and storing them again gives the same bytes.

Latents (MLA) have the bytes of DeepSeek's ``fp8_ds_mla``: 656 for a latent of 512 with 64 rotary
channels. A row holds the codes of the latent in e4m3, a float32 scale for each tile of 128 of them,
and the rotary channels in bfloat16.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg
from hisparse.kernels.operation import Operation, new_tensors
from hisparse.types import StoredKV

__all__ = [
    "QUANTIZED",
    "LatentRow",
    "decode_latents",
    "dequantize",
    "encode_latents",
    "quantize",
]

#: Bits of a float32 are its exponent, biased by 127, and 23 bits of fraction.
FRACTION_BITS = 23


class ScaleRule(NamedTuple):
    """How the scale of a vector follows from its largest magnitude.

    Attributes:
        carry: added to a float's bits, it carries into the exponent from some fraction on: the one
            halfway between the dtype's largest number and the next that it would have. So the
            largest magnitude of a scaled vector stays below twice the least that it can be. Both
            bounds lie halfway between two numbers of the dtype: rounding stays inside, and a
            decoded vector gets the same scale again.
        exponent: of the largest magnitude after scaling, where ``carry`` does not carry; that of
            the dtype's largest number.
        least_scale: scales the least number of the dtype to that of float16, 2 ** -24. It is 103
            less the binary logarithm of the dtype's least number.
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
        rope: rotary channels, which only the key has.
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
    def places(self) -> tuple[int, int, int, int]:
        """Rank, tile, and where scales and rotary channels begin: what C++ takes."""
        return self.rank, self.tile, self.scales_at, self.rope_at

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
        stored: what they scale, of any shape and dtype.
        scales: the scales, of any shape and dtype; None: there are none.
    """
    needed = stored.dtype in QUANTIZED
    if needed != (scales is not None):
        got, expected = ("None", "them") if needed else ("them", "None")
        raise KernelError(f"{name}: got {got}, expected {expected} for {stored.dtype}")


def _quantize_on_cpu(
    call: Callable[..., Any], k: Tensor, v: Tensor, dtype: torch.dtype
) -> StoredKV:
    shapes = [(k.shape, dtype), (v.shape, dtype), ((*k.shape[:-1], 2), torch.uint8)]
    stored = new_tensors("quantize", shapes, k.device)
    # [..., H, D] -> [T, H, D], a view, or a copy if strides do not allow one.
    call(*(x.reshape(-1, *x.shape[-2:]) for x in (k, v, *stored)))
    return StoredKV(*stored)


def _encode_on_cpu(call: Callable[..., Any], latents: Tensor, row: LatentRow) -> Tensor:
    rows = latents.new_empty(*latents.shape[:-1], row.num_bytes, dtype=torch.uint8)
    call(latents.reshape(-1, row.width), rows.view(-1, row.num_bytes), *row.places)
    return rows


def _decode_on_cpu(
    call: Callable[..., Any], pages: Tensor, table: Tensor, out: Tensor, row: LatentRow
) -> None:
    """C++ does not write float16."""
    if out.dtype == torch.float16:
        DECODE_LATENTS.function("reference")(pages, table, out, row)
    else:
        call(pages, table, out, *row.places)


QUANTIZE = Operation(
    __name__,
    "quantize",
    Arg("k", "*T H! Dk!", *FLOATS),
    Arg("v", "*T H Dv!", like="k"),
    cpu=_quantize_on_cpu,
)
DEQUANTIZE = Operation(
    __name__,
    "dequantize",
    Arg("k", "*T Dk", *QUANTIZED, layout="any"),
    Arg("v", "*T Dv", like="k", layout="any"),
    Arg("scales", "*T 2", torch.uint8, layout="any"),
    Arg("out.k", "*T Dk", *FLOATS, on=(), written=True, layout="any"),
    Arg("out.v", "*T Dv", *FLOATS, on=("out.k",), written=True, layout="any"),
    cpu=lambda call, stored, out: call(*stored, *out),
)
ENCODE_LATENTS = Operation(
    __name__,
    "encode_latents",
    Arg("latents", "*T width", *FLOATS),
    values=("width",),
    cpu=_encode_on_cpu,
)
DECODE_LATENTS = Operation(
    __name__,
    "decode_latents",
    Arg("pages", "N! S bytes", torch.uint8, layout="any"),
    Arg("table", "n", torch.int32, layout="all"),
    Arg("out", "n S width", *FLOATS, written=True, layout="all"),
    values=("width", "bytes"),
    cpu=_decode_on_cpu,
)


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype, *, impl: str = "auto") -> StoredKV:
    """Round to ``dtype``, to the nearest and ties to even, under the scale of each vector.

    Magnitudes of float16 have a limit, because the next number under their scale, 65536, is beyond
    float16: 61440 in e4m3, 65024 in int8. In int8 NaN becomes 0.

    Args:
        k: ``[..., H, Dk]`` float32, bfloat16 or float16.
        v: ``[..., H, Dv]``, other dimensions and dtype as ``k``.
        dtype: one of ``QUANTIZED``.

    Returns:
        K and V in ``dtype``, contiguous, and their scales.
    """
    if dtype not in QUANTIZED:
        raise KernelError(f"dtype: got {dtype}, expected one of {', '.join(map(str, QUANTIZED))}")
    stored: StoredKV = QUANTIZE(impl, k, v)(k, v, dtype)
    return stored


def dequantize(stored: StoredKV, out: tuple[Tensor, Tensor], *, impl: str = "auto") -> None:
    """Decode the result of :func:`quantize`.

    Args:
        stored: keys, values and scales, any strides.
        out: K and V, ``[..., D]`` as in ``stored``, float32, bfloat16 or float16. Written to.
    """
    DEQUANTIZE(impl, *stored, *out)(stored, out)


def encode_latents(latents: Tensor, row: LatentRow, *, impl: str = "auto") -> Tensor:
    """Round latents to e4m3 and their rotary channels to bfloat16, to the nearest, ties to even.

    float16 magnitudes above 61440 become 61440 in the latent, and 65280 in the rotary channels.

    Args:
        latents: ``[..., rank + rope]`` float32, bfloat16 or float16.
        row: the order of the bytes.

    Returns:
        ``[..., num_bytes] uint8``, contiguous.
    """
    rows: Tensor = ENCODE_LATENTS(impl, latents, values=(row.width,))(latents, row)
    return rows


def decode_latents(
    pages: Tensor, table: Tensor, row: LatentRow, out: Tensor, *, impl: str = "auto"
) -> None:
    """Decode pages of latents that :func:`encode_latents` made.

    Args:
        pages: ``[N, S, num_bytes] uint8``; the rows of a page may have any stride.
        table: ``[n] int32``, pages to decode; where it is -1, ``out`` gets any numbers.
        row: the order of the bytes.
        out: ``[n, S, rank + rope]`` float32, bfloat16 or float16, contiguous. Written to.
    """
    run = DECODE_LATENTS(impl, pages, table, out, values=(row.width, row.num_bytes))
    run(pages, table, out, row)
