"""Keys and values in eight bits, with a power of two as scale for each token and head.

A scale brings a vector into the range of the stored dtype. One byte holds the power of two (E8M0,
as in https://arxiv.org/abs/2310.10537). Decoded values are exact in float32, bfloat16 and float16
alike, and storing them again gives the same bytes.

Latents (MLA) have the bytes of DeepSeek's ``fp8_ds_mla``: 656 for a latent of 512 with 64 rotary
channels. A row holds the codes of the latent in e4m3, a float32 scale for each tile of 128 of them,
and the rotary channels in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg
from hisparse.kernels.operation import Operation
from hisparse.kernels.quantize.rules import QUANTIZED, LatentRow
from hisparse.types import StoredKV

__all__ = [
    "QUANTIZED",
    "LatentRow",
    "decode_latents",
    "dequantize",
    "encode_latents",
    "quantize",
]


def _pages_exist(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    if sizes["N"] == 0 and sizes["n"]:
        raise KernelError("pages: got none, expected at least one")


QUANTIZE = Operation(
    __name__,
    "quantize",
    Arg("k", FLOATS, "*T Dk"),
    Arg("v", "k", "*T Dv"),
)
DEQUANTIZE = Operation(
    __name__,
    "dequantize",
    Arg("k", QUANTIZED, "*T Dk", layout="any"),
    Arg("v", "k", "*T Dv", layout="any"),
    Arg("scales", torch.uint8, "*T 2", layout="any"),
    Arg("out.k", FLOATS, "*T Dk", on=(), written=True),
    Arg("out.v", FLOATS, "*T Dv", on=("out.k",), written=True),
)
ENCODE_LATENTS = Operation(
    __name__,
    "encode_latents",
    Arg("latents", FLOATS, "*T width"),
    values=("width",),
)
DECODE_LATENTS = Operation(
    __name__,
    "decode_latents",
    Arg("pages", torch.uint8, "N S bytes", layout="any"),
    Arg("table", torch.int32, "n", layout="all"),
    Arg("out", FLOATS, "n S width", written=True),
    values=("width", "bytes"),
    also=_pages_exist,
)


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype, *, impl: str = "auto") -> StoredKV:
    """Round to ``dtype``, to the nearest and ties to even, under the scale of each vector.

    Magnitudes of float16 have a limit, because the next number under their scale, 65536, is beyond
    float16: 61440 in e4m3, 65024 in int8. In int8 NaN becomes 0.

    Args:
        k: ``[..., Dk]`` float32, bfloat16 or float16.
        v: ``[..., Dv]``, other dimensions and dtype as ``k``.
        dtype: one of ``QUANTIZED``.
        impl: "auto", or an implementation's name.

    Returns:
        K and V in ``dtype``, contiguous, and their scales.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
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
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    if stored.scales is None:
        raise KernelError(
            f"scales: got None, expected the scales of {stored.k.dtype} keys and values"
        )
    DEQUANTIZE(impl, *stored, *out)(stored, out)


def encode_latents(latents: Tensor, row: LatentRow, *, impl: str = "auto") -> Tensor:
    """Round latents to e4m3 and their rotary channels to bfloat16, to the nearest, ties to even.

    float16 magnitudes above 61440 become 61440 in the latent, and 65280 in the rotary channels.

    Args:
        latents: ``[..., rank + rope]`` float32, bfloat16 or float16.
        row: the order of the bytes.
        impl: "auto", or an implementation's name.

    Returns:
        ``[..., num_bytes] uint8``, contiguous.

    Raises:
        KernelError: the latents have another shape or dtype.
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
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    run = DECODE_LATENTS(impl, pages, table, out, values=(row.width, row.num_bytes))
    run(pages, table, out, row)
