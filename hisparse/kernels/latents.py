"""Latents in eight bits (MLA): checked entry points. The bytes of a token are those of DeepSeek's
``fp8_ds_mla``: 656 for a latent of 512 with 64 rotary channels.

A row holds the codes of the latent in e4m3, a float32 scale for each tile of 128 of them, and the
rotary channels in bfloat16. The scales are powers of two, as those of ``quantize``: decoded values
are exact in float32, bfloat16 and float16, and encoding them again gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.latent_row import LatentRow

__all__ = ["decode_latents", "encode_latents"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
    check_once(_check_encode, latents, values=(row,))
    rows: Tensor = implementation(impl, latents.device).encode_latents(latents, row)
    return rows


def decode_latents(
    pages: Tensor, table: Tensor, row: LatentRow, out: Tensor, *, impl: str = "auto"
) -> None:
    """Decode pages of latents that :func:`encode_latents` made.

    Args:
        pages: ``[N, S, num_bytes] uint8``; the rows of a page may have any stride.
        table: ``[n] int32``, pages to decode; of others than pages (-1), ``out`` gets any numbers.
        row: the order of the bytes.
        out: ``[n, S, rank + rope]`` float32, bfloat16 or float16, contiguous. Written to.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_decode, pages, table, out, values=(row,))
    implementation(impl, pages.device).decode_latents(pages, table, row, out)


def _check_encode(latents: Tensor, row: LatentRow) -> None:
    check_tensor("latents", latents, _FLOATS, (*latents.shape[:-1], row.width))


def _check_decode(pages: Tensor, table: Tensor, out: Tensor, row: LatentRow) -> None:
    check_tensor("pages", pages, torch.uint8, (None, None, row.num_bytes))
    check_tensor("table", table, torch.int32, (None,), pages.device)
    shape = (table.shape[0], pages.shape[1], row.width)
    check_tensor("out", out, _FLOATS, shape, pages.device)
    if pages.shape[0] == 0 and table.shape[0]:
        raise KernelError("pages: got none, expected at least one")
