"""Latents in eight bits in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels import reference
from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.kernels.latent_row import LatentRow

__all__ = ["decode_latents", "encode_latents"]


def encode_latents(latents: Tensor, row: LatentRow) -> Tensor:
    """See :func:`hisparse.kernels.encode_latents`."""
    rows = latents.new_empty(*latents.shape[:-1], row.num_bytes, dtype=torch.uint8)
    tokens = dense_rows(latents.reshape(-1, row.width))
    call_cpu("encode_latents", tokens, *_layout(row), rows.view(-1, row.num_bytes))
    return rows


def decode_latents(pages: Tensor, table: Tensor, row: LatentRow, out: Tensor) -> None:
    """See :func:`hisparse.kernels.decode_latents`."""
    if out.dtype == torch.float16:
        reference.decode_latents(pages, table, row, out)
    else:
        call_cpu("decode_latents", pages, table.contiguous(), *_layout(row), out)


def _layout(row: LatentRow) -> tuple[int, int, int, int]:
    return row.rank, row.tile, row.scales_at, row.rope_at
