"""Outlines of pages in plain PyTorch; :func:`page_outline` has no other implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.sketch_layout import BLOCK, SCALE_OFFSET, SketchLayout

__all__ = ["outline_score", "outline_values", "page_outline"]


def page_outline(sketches: Tensor, layout: SketchLayout) -> Tensor:
    """The outlines of pages, from their sketches: the base with half of its bits.

    Args:
        sketches: ``[..., bytes] uint8``, in ``layout``.
        layout: of the sketches.

    Returns:
        ``[..., outline_bytes(layout.dim)] uint8``.
    """
    base = sketches[..., : layout.dim].view(torch.int8).float()
    base = torch.nn.functional.pad(base, (0, -layout.dim % (2 * BLOCK)))
    # The inverse of the values that four bits stand for, rounded.
    whole = ((base.abs() / 1.4 + 9).sqrt() - 3).round() * base.sign()
    low, high = (whole.to(torch.int16) & 15).chunk(2, -1)
    codes = (low | high << 4).to(torch.uint8)
    return torch.cat([codes, sketches[..., layout.block_scales : layout.mask]], -1)


def outline_values(outlines: Tensor, dim: int) -> Tensor:
    """Decode outlines: ``[..., bytes] uint8`` -> ``[..., dim] float32``."""
    codes, scales = outlines.split([outlines.shape[-1] + -dim // BLOCK, -(-dim // BLOCK)], -1)
    nibbles = torch.cat([codes & 15, codes >> 4], -1)[..., :dim].to(torch.int32)
    signed = (nibbles - 16 * (nibbles > 7)).float()
    scale = ((scales.to(torch.int32) + SCALE_OFFSET) << 20).view(torch.float32)
    scale = scale.repeat_interleave(BLOCK, dim=-1)[..., :dim]
    values: Tensor = 1.4 * signed * (signed.abs() + 6) * scale
    return values


def outline_score(
    query: Tensor, outlines: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.outline_score`."""
    values = outline_values(outlines[host_page_table.long()], query.shape[-1])
    grouped = query.unflatten(1, (values.shape[2], -1))
    scores = torch.einsum("bhgd,bphd->bhgp", grouped, values).flatten(1, 2)
    page = torch.arange(scores.shape[-1], device=scores.device)
    masked: Tensor = scores.masked_fill((page >= num_pages[:, None])[:, None], -torch.inf)
    return masked
