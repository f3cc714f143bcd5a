"""Sketches and outlines of pages in plain PyTorch: the oracle of the other implementations."""

import torch
from torch import Tensor

from hisparse.kernels.arguments import Arg, check_all
from hisparse.kernels.attention.reference import paged_attention
from hisparse.kernels.sketch.layout import BLOCK, MOST_SCALE, SCALE_OFFSET, SketchLayout
from hisparse.kernels.sketch.op import TailPages, tail_lse
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
    base = base_values(sketches, layout)
    keys = base[..., None, :].repeat(*[1] * (sketches.dim() - 1), layout.page_size, 1)
    count = layout.num_channels
    if count == 0:
        return keys
    places, bits = layout.code_places(sketches.device)
    most = 2**layout.bits - 1
    codes = (sketches[..., places] >> bits) & most
    scale = _scale(sketches[..., layout.channel_scales : layout.channel_scales + count])
    detail = ((codes - most / 2) * scale[..., None]).transpose(-1, -2)
    if layout.bits == 4:
        return keys.add_(detail)
    channels = _channels(sketches, layout)[..., None, :].expand_as(detail)
    return keys.scatter_add(-1, channels, detail)


def base_values(sketches: Tensor, layout: SketchLayout) -> Tensor:
    """What sketches stand for without codes: ``[..., bytes] uint8`` -> ``[..., D] float32``."""
    scales = _scale(sketches[..., layout.block_scales : layout.block_scales + layout.blocks])
    values = sketches[..., : layout.dim].view(torch.int8)
    base: Tensor = values * scales.repeat_interleave(BLOCK, dim=-1)[..., : layout.dim]
    return base


def _channels(sketches: Tensor, layout: SketchLayout) -> Tensor:
    """Numbers of the detailed channels, ascending, ``[..., N] int64``."""
    if layout.numbered:
        width = layout.channel_width
        numbers = sketches[..., layout.channels : layout.channels + layout.num_channels * width]
        low, high = numbers[..., ::width].long(), numbers[..., width - 1 :: width].long()
        return (low + 256 * high * (width - 1)).clamp(max=layout.dim - 1)
    bit = torch.arange(BLOCK, device=sketches.device)
    bits = sketches[..., layout.channels : layout.block_scales, None] >> bit & 1
    chosen = bits.flatten(-2)[..., : layout.dim]
    return chosen.sort(dim=-1, descending=True, stable=True).indices[..., : layout.num_channels]


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
    scales = sketches[..., layout.block_scales : layout.block_scales + layout.blocks]
    return torch.cat([codes, scales], -1)


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
    codes = _scale_code(furthest * 2.0 ** (1 - layout.bits))
    scale = _scale(codes)[:, :, None]
    offset = keys - base[:, :, None]
    if layout.bits == 4:
        steps = (offset / scale + 8).clamp(0, 15)
    else:
        steps = (offset >= -scale).float() + (offset >= 0) + (offset >= scale)
    steps = steps.transpose(2, 3).gather(2, order[..., None].expand(*order.shape, keys.shape[2]))
    sketch = keys.new_zeros(*order.shape[:2], layout.num_bytes, dtype=torch.uint8)
    places, bits = (x.flatten() for x in layout.code_places(keys.device))
    packed = (steps.flatten(2).long() << bits).to(torch.uint8)
    sketch.scatter_add_(-1, places.expand_as(packed), packed)

    def write(offset: int, values: Tensor) -> None:
        sketch[..., offset : offset + values.shape[-1]] = values.to(torch.uint8)

    write(0, whole.to(torch.int8).view(torch.uint8))
    write(layout.block_scales, block_codes)
    write(layout.channel_scales, codes.gather(-1, order))
    if layout.bits == 4:
        return sketch
    if layout.numbered:
        # The low byte of a number comes first; there may be one only.
        numbers = torch.stack([order & 255, order >> 8], -1)[..., : layout.channel_width]
        write(layout.channels, numbers.flatten(-2))
    else:
        chosen = torch.nn.functional.pad(chosen, (0, layout.blocks * BLOCK - dim))
        bit = 2 ** torch.arange(BLOCK, device=keys.device)
        write(layout.channels, (chosen.unflatten(-1, (-1, BLOCK)) * bit).sum(-1))
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
