"""Sketches of pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels._sketch_layout import BLOCK, SketchLayout

__all__ = ["page_sketch", "sketch_keys", "sketch_score"]

#: Steps of power iteration; what two leave of the gap to many is within noise in recall.
_ITERATIONS = 4
_TINY = 1e-30
#: A scale's code plus this, in a float32's exponent and upper fraction bits, is the scale.
_OFFSET = 107 << 3


def page_sketch(
    keys: Tensor, sketches: Tensor, host_pages: Tensor, layout: SketchLayout
) -> None:
    """See :func:`hisparse.kernels.page_sketch`."""
    stored = (host_pages >= 0).nonzero()[:, 0]
    sketches[host_pages[stored].long()] = _encode(keys[stored].float().transpose(1, 2), layout)


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
) -> Tensor:
    """See :func:`hisparse.kernels.sketch_score`."""
    own = sketch_keys(sketches[host_page_table.long()], layout)  # [B, P, Hkv, S, D]
    grouped = query.unflatten(1, (own.shape[2], -1))
    scores = torch.einsum("bhgd,bphsd->bhgps", grouped, own).logsumexp(-1).flatten(1, 2)
    page = torch.arange(scores.shape[-1], device=scores.device)
    masked: Tensor = scores.masked_fill((page >= num_pages[:, None])[:, None], -torch.inf)
    return masked


def sketch_keys(sketches: Tensor, layout: SketchLayout) -> Tensor:
    """The keys that sketches stand for: ``[..., bytes] uint8`` -> ``[..., S, D] float32``."""
    dim, pairs, size = layout.dim, layout.pairs, layout.page_size
    scales = _scale(sketches[..., layout.scales :])
    blocks = scales[..., : layout.blocks].repeat_interleave(BLOCK, dim=-1)[..., :dim]
    mean = sketches[..., :dim].view(torch.int8) * blocks
    directions = _unpack(sketches[..., dim : layout.coordinates].unflatten(-1, (pairs, dim)))
    coordinates = _unpack(
        sketches[..., layout.coordinates : layout.scales].unflatten(-1, (pairs, size))
    )
    per_direction = scales[..., layout.blocks : layout.blocks + 2 * pairs, None]
    residual = coordinates.transpose(-1, -2) @ (directions * per_direction)
    keys: Tensor = mean[..., None, :] + residual
    return keys


def _encode(keys: Tensor, layout: SketchLayout) -> Tensor:
    """``[P, Hkv, S, D] float32`` -> ``[P, Hkv, bytes] uint8``."""
    mean, codes, exact = _quantize_mean(keys.mean(2), layout)
    rest = keys - exact[:, :, None]
    # Tokens far from the mean weigh more: a page is worth its highest logits.
    weight = rest.square().sum(-1)
    weight = weight / weight.amax(-1, keepdim=True).clamp(min=_TINY)
    parts: list[tuple[Tensor, Tensor]] = []
    for _ in range(layout.num_directions):
        direction, coordinate, code, product = _next_direction(rest, weight)
        rest = rest - product
        codes = torch.cat([codes, code], -1)
        parts.append((direction, coordinate))
    packed = [mean.to(torch.int8).view(torch.uint8)]
    for which in (0, 1):
        for low, high in zip(parts[::2], parts[1::2], strict=True):
            packed.append((low[which] + 8 + (high[which] + 8) * 16).to(torch.uint8))
    packed.append(codes.to(torch.uint8))
    sketch = torch.cat(packed, -1)
    return torch.nn.functional.pad(sketch, (0, layout.num_bytes - sketch.shape[-1]))


def _quantize_mean(mean: Tensor, layout: SketchLayout) -> tuple[Tensor, Tensor, Tensor]:
    """``[..., D]`` -> integers in -127 to 127, codes of the scales, what these stand for."""
    padded = torch.nn.functional.pad(mean, (0, layout.blocks * BLOCK - layout.dim))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    code = _scale_code(blocks.abs().amax(-1) / 127)
    scale = _scale(code)[..., None]
    whole = (blocks / scale).round().clamp(-127, 127)
    exact = (whole * scale).flatten(-2)[..., : layout.dim]
    return whole.flatten(-2)[..., : layout.dim], code, exact


def _next_direction(rest: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The direction in which most of what is left of a page's tokens lies.

    Args:
        rest: ``[P, Hkv, S, D]``.
        weight: ``[P, Hkv, S]``, of the tokens.

    Returns:
        direction ``[P, Hkv, D]`` and coordinates ``[P, Hkv, S]``, integers in -7 to 7; code of the
        scale ``[P, Hkv, 1]``; what they stand for, as ``rest``.
    """
    furthest = (rest.square().sum(-1) * weight).argmax(-1)[..., None, None]
    direction = rest.gather(2, furthest.expand(*furthest.shape[:3], rest.shape[-1]))[:, :, 0]
    for _ in range(_ITERATIONS):
        coordinate = torch.einsum("phsd,phd->phs", rest, _largest_is(1, direction))
        direction = torch.einsum("phsd,phs->phd", rest, coordinate * weight)
    coordinate = torch.einsum("phsd,phd->phs", rest, _largest_is(1, direction))
    coordinate = _largest_is(7, coordinate).round()
    # The best direction for coordinates that are already rounded.
    total = (coordinate.square() * weight).sum(-1, keepdim=True).clamp(min=_TINY)
    direction = torch.einsum("phsd,phs->phd", rest, coordinate * weight) / total
    code = _scale_code(direction.abs().amax(-1, keepdim=True) / 7)
    scale = _scale(code)
    whole = (direction / scale).round().clamp(-7, 7)
    product = coordinate[..., None] * (whole * scale)[..., None, :]
    return whole, coordinate, code, product


def _largest_is(value: float, x: Tensor) -> Tensor:
    return x * (value / x.abs().amax(-1, keepdim=True).clamp(min=_TINY))


def _scale_code(scale: Tensor) -> Tensor:
    """The code of the smallest scale that is not below ``scale``, as int32."""
    bits = scale.contiguous().view(torch.int32)
    return (((bits + ((1 << 20) - 1)) >> 20) - _OFFSET).clamp(0, 255)


def _scale(code: Tensor) -> Tensor:
    return ((code.to(torch.int32) + _OFFSET) << 20).view(torch.float32)


def _unpack(packed: Tensor) -> Tensor:
    """``[..., pairs, n] uint8`` -> ``[..., 2 * pairs, n] float32``, integers in -7 to 7."""
    both = torch.stack([packed & 15, packed >> 4], dim=-2)
    return both.flatten(-3, -2).float() - 8
