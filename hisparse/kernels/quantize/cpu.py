"""Eight-bit keys, values and latents in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.quantize import reference
from hisparse.kernels.quantize.op import DECODE_LATENTS, ENCODE_LATENTS, QUANTIZE, LatentRow
from hisparse.types import StoredKV


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype) -> StoredKV:
    """See :func:`hisparse.kernels.quantize`."""
    codes = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v)]
    scales = torch.empty((*k.shape[:-1], 2), dtype=torch.uint8, device=k.device)
    QUANTIZE.on_cpu(_vectors(k), _vectors(v), *map(_vectors, (*codes, scales)))
    return StoredKV(codes[0], codes[1], scales)


def _vectors(x: Tensor) -> Tensor:
    """``[..., H, D]`` -> ``[T, H, D]``, a view, or a copy if strides do not allow one."""
    return x.reshape(-1, *x.shape[-2:])


def encode_latents(latents: Tensor, row: LatentRow) -> Tensor:
    """See :func:`hisparse.kernels.encode_latents`."""
    rows = latents.new_empty(*latents.shape[:-1], row.num_bytes, dtype=torch.uint8)
    vectors = (latents.reshape(-1, row.width), rows.view(-1, row.num_bytes))
    ENCODE_LATENTS.on_cpu(*vectors, *_layout(row))
    return rows


def decode_latents(pages: Tensor, table: Tensor, out: Tensor, row: LatentRow) -> None:
    """See :func:`hisparse.kernels.decode_latents`."""
    if out.dtype == torch.float16:
        reference.decode_latents(pages, table, out, row)
    else:
        DECODE_LATENTS.on_cpu(pages, table, out, *_layout(row))


def _layout(row: LatentRow) -> tuple[int, int, int, int]:
    return row.rank, row.tile, row.scales_at, row.rope_at
