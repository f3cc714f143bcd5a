"""Sketches and outlines of pages in plain PyTorch: the oracle of the other implementations."""

import torch
from torch import Tensor

from hisparse.kernels.arguments import Arg, check_all
from hisparse.kernels.attention.reference import paged_attention
from hisparse.kernels.sketch.op import (
    BLOCK,
    MOST_SCALE,
    SCALE_OFFSET,
    SketchLayout,
    TailPages,
    tail_lse,
)
from hisparse.kernels.summary.reference import stored_pages

_OUTLINED = (Arg("sketches", "*P bytes", torch.uint8, layout="any"),)


def page_sketch(keys: Tensor, sketches: Tensor, host_pages: Tensor, layout: SketchLayout) -> None:
    """See :func:`hisparse.kernels.page_sketch`."""
    entry, page = stored_pages(host_pages)
    sketches[page] = _encode(keys[entry].float().transpose(1, 2), layout)


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    tail: TailPages | None,
    layout: SketchLayout,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`hisparse.kernels.sketch_score`."""
    query = query.float() * scale
    page_keys = sketch_keys(sketches[host_page_table.long()], layout)
    grouped = query.unflatten(1, (page_keys.shape[2], -1))
    scores = torch.einsum("bhgd,bphsd->bhgps", grouped, page_keys).logsumexp(-1).flatten(1, 2)
    return scores, None if tail is None else tail_lse(query, tail.appended(), paged_attention)


def sketch_keys(sketches: Tensor, layout: SketchLayout) -> Tensor:
    """Decode sketches to keys: ``[..., bytes] uint8`` -> ``[..., S, D] float32``."""
    dim, size, count = layout.dim, layout.page_size, layout.num_channels
    scales = _scale(sketches[..., layout.block_scales : layout.mask])
    base = sketches[..., :dim].view(torch.int8) * scales.repeat_interleave(BLOCK, dim=-1)[..., :dim]
    keys = base[..., None, :].repeat(*[1] * (sketches.dim() - 1), size, 1)
    if count == 0:
        return keys
    shift = torch.arange(0, 8, 2, device=sketches.device)
    packed = sketches[..., dim : layout.block_scales].unflatten(-1, (count, -1))
    codes = ((packed[..., None] >> shift) & 3).flatten(-2)[..., :size]
    scale = _scale(sketches[..., layout.channel_scales : layout.channel_scales + count])
    detail = ((codes - 1.5) * scale[..., None]).transpose(-1, -2)
    bit = torch.arange(BLOCK, device=sketches.device)
    bits = sketches[..., layout.mask : layout.channel_scales, None] >> bit
    chosen = (bits & 1).flatten(-2)[..., :dim].bool()
    # The rank of each chosen channel among the chosen; the others read any place.
    place = (chosen.cumsum(-1) - 1).clamp(0, count - 1)[..., None, :].expand_as(keys)
    return keys + torch.where(chosen[..., None, :], detail.gather(-1, place), 0.0)


def page_outline(sketches: Tensor, layout: SketchLayout) -> Tensor:
    """The outlines of pages, from their sketches: the base with half of its bits.

    Args:
        sketches: ``[..., bytes] uint8``, in ``layout``.
        layout: of the sketches.

    Returns:
        ``[..., outline_bytes(layout.dim)] uint8``.
    """
    check_all(_OUTLINED, (sketches,), {"bytes": layout.num_bytes}, "sketches")
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
    scale = _scale(scales).repeat_interleave(BLOCK, dim=-1)[..., :dim]
    values: Tensor = 1.4 * signed * (signed.abs() + 6) * scale
    return values


def outline_score(
    query: Tensor, outlines: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.outline_score`."""
    values = outline_values(outlines[host_page_table.long()], query.shape[-1])
    grouped = query.unflatten(1, (values.shape[2], -1))
    scores: Tensor = torch.einsum("bhgd,bphd->bhgp", grouped, values).flatten(1, 2)
    return scores


def _encode(keys: Tensor, layout: SketchLayout) -> Tensor:
    """``[P, Hkv, S, D] float32`` -> ``[P, Hkv, bytes] uint8``."""
    dim, count = layout.dim, layout.num_channels
    high, low = keys.amax(2), keys.amin(2)
    total = keys[:, :, 0]
    for token in range(1, layout.page_size):  # In this order, for all implementations.
        total = total + keys[:, :, token]
    # Of equal ranges the first are chosen.
    order = (high - low).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    order = order.sort(dim=-1).values
    chosen = torch.zeros_like(high, dtype=torch.bool).scatter_(-1, order, True)
    wanted = torch.where(chosen, high * 0.5 + low * 0.5, total / layout.page_size)
    whole, block_codes, base = _quantize(wanted, layout)

    furthest = torch.maximum(high - base, base - low)
    codes = _scale_code(furthest * 0.5)
    scale = _scale(codes)[:, :, None]
    offset = keys - base[:, :, None]
    steps = (offset >= -scale).float() + (offset >= 0) + (offset >= scale)
    steps = steps.transpose(2, 3).gather(2, order[..., None].expand(*order.shape, keys.shape[2]))
    packed = torch.nn.functional.pad(steps, (0, 4 * layout.code_bytes - layout.page_size))
    weights = 4.0 ** torch.arange(4, device=keys.device)
    packed = (packed.unflatten(-1, (-1, 4)) * weights).sum(-1).flatten(2)
    bits = torch.nn.functional.pad(chosen.float(), (0, layout.blocks * BLOCK - dim))
    mask = (bits.unflatten(-1, (-1, BLOCK)) * 2.0 ** torch.arange(BLOCK, device=keys.device)).sum(
        -1
    )
    parts = [whole.to(torch.int8).view(torch.uint8)]
    parts += [x.to(torch.uint8) for x in (packed, block_codes, mask, codes.gather(-1, order))]
    sketch = torch.cat(parts, -1)
    sketch = torch.nn.functional.pad(sketch, (0, layout.num_bytes - sketch.shape[-1]))
    # The low byte of a number comes first; there may be none.
    channels = torch.stack([order & 255, order >> 8], -1)[..., : layout.channel_width].flatten(-2)
    sketch[..., layout.channels : layout.channels + channels.shape[-1]] = channels.to(torch.uint8)
    return sketch


def _quantize(base: Tensor, layout: SketchLayout) -> tuple[Tensor, Tensor, Tensor]:
    """``[..., D]`` -> integers in -127 to 127, codes of the scales, decoded values."""
    padded = torch.nn.functional.pad(base, (0, layout.blocks * BLOCK - layout.dim))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    code = _scale_code(blocks.abs().amax(-1) / 127)
    scale = _scale(code)[..., None]
    whole = (blocks / scale).round().clamp(-127, 127)
    exact = (whole * scale).flatten(-2)[..., : layout.dim]
    return whole.flatten(-2)[..., : layout.dim], code, exact


def _scale_code(scale: Tensor) -> Tensor:
    """The code of the smallest scale that is not below ``scale``, as int32."""
    bits = scale.contiguous().view(torch.int32)
    return (((bits + ((1 << 20) - 1)) >> 20) - SCALE_OFFSET).clamp(0, MOST_SCALE)


def _scale(code: Tensor) -> Tensor:
    return ((code.to(torch.int32) + SCALE_OFFSET) << 20).view(torch.float32)
