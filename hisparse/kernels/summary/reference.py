"""Ranges of keys, and scores by them, in plain PyTorch: the oracle of all implementations."""

import torch
from torch import Tensor

_FP8_LEAST_NORMAL = 2.0**-6
#: Added to a float's bits, it carries into the exponent if the fraction is above that of 448, the
#: largest number of float8_e4m3fn.
_CARRY = 0x1FFFFF


def page_summary(
    keys: Tensor, summaries: Tensor, host_pages: Tensor, scales: Tensor | None
) -> None:
    """See :func:`hisparse.kernels.page_summary`."""
    entry, page = stored_pages(host_pages)
    page_keys = keys[entry].unflatten(1, (summaries.shape[1], -1)).float()
    high, low = page_keys.amax(dim=2), page_keys.amin(dim=2)
    if scales is not None:
        high, low, scales[page] = _scaled_to_fp8(high, low)
    high = round_outward(high, summaries.dtype, up=True)
    low = round_outward(low, summaries.dtype, up=False)
    summaries[page] = torch.cat([high, low], dim=-1)


def stored_pages(host_pages: Tensor) -> tuple[Tensor, Tensor]:
    """What to write where for ``host_pages [P]``, -1 for none, without waiting for a GPU.

    Returns:
        ``[P] int64`` each: the entry to write, and its page. An entry without a page stands for the
        first one that has a page; if none has, all are written to page 0, the padding page.
    """
    entry = torch.arange(len(host_pages), device=host_pages.device)
    if len(host_pages):
        given = host_pages >= 0
        entry = torch.where(given, entry, given.int().argmax())
    return entry, host_pages[entry].long().clamp(min=0)


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
    scale: float,
) -> Tensor:
    """See :func:`hisparse.kernels.page_score`."""
    query = query.float() * scale
    pages, (ranges, kv_heads) = host_page_table.long(), summaries.shape[1:3]
    gathered = summaries[pages].flatten(1, 2).to(query.dtype)  # [B, P * ranges, Hkv, 2D]
    if scales is not None:
        gathered = gathered * scales[pages].flatten(1, 2)[..., None]
    signed = torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
    signed = signed.unflatten(1, (kv_heads, -1))
    bounds = (signed @ gathered.permute(0, 2, 3, 1)).flatten(1, 2)
    scores: Tensor = bounds.unflatten(-1, (-1, ranges)).amax(-1)
    return scores


def _scaled_to_fp8(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide maxima and minima ``[..., D]`` by a power of two, so that all are within +-448.

    Returns:
        maxima, minima and the powers ``[...] float32``, 2^-100 to 2^100.
    """
    largest = torch.maximum(high.abs(), low.abs()).amax(-1, keepdim=True)
    # Dividing by a power of two is exact.
    scale = (exponent_within_448(largest).clamp_(27, 227) << 23).view(torch.float32)
    high, low = high / scale, low / scale
    high, low = _outside_subnormals(high, low), -_outside_subnormals(-low, -high)
    return high, low, scale[..., 0]


def exponent_within_448(largest: Tensor) -> Tensor:
    """Biased exponents ``int32`` of the least powers of two over which float32 is within +-448."""
    return ((largest.view(torch.int32) + _CARRY) >> 23) - 8


def _outside_subnormals(high: Tensor, low: Tensor) -> Tensor:
    """Raise maxima that are subnormal in float8_e4m3fn to its least normal number, or to zero.

    Processors multiply subnormal numbers a hundred times slower. Where the minimum is subnormal as
    well, the maximum stays: that channel's range is tiny, and would grow too much.
    """
    raised = (high.abs() < _FP8_LEAST_NORMAL) & (low.abs() >= _FP8_LEAST_NORMAL)
    return torch.where(raised, _FP8_LEAST_NORMAL * (high > 0), high)


def round_outward(x: Tensor, dtype: torch.dtype, *, up: bool) -> Tensor:
    """Convert to a narrower dtype; the result is never below ``x`` if ``up``, else never above.

    Args:
        x: ``float32``, any shape.
        dtype: float32, bfloat16 or float8_e4m3fn, which has no number beyond 448: NaN.
        up: direction.
    """
    if dtype == torch.float32:
        return x
    if dtype == torch.float8_e4m3fn:
        return _round_outward_fp8(x, up)
    # The upper half of a float32 is a bfloat16, rounded towards zero.
    bits = x.contiguous().view(torch.int32)
    away = ((bits & 0xFFFF) != 0) & ((x > 0) if up else (x < 0))
    return ((bits >> 16) + away).to(torch.int16).view(torch.bfloat16)


def _round_outward_fp8(x: Tensor, up: bool) -> Tensor:
    # Beyond, the outward step gives NaN, and the other bound stays 448. Some versions of PyTorch
    # would make NaN of both.
    nearest = x.contiguous().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    read = nearest.float()
    short = read < x if up else read > x
    # One more in the bits is a step away from zero; a bound on the other side of zero steps
    # towards it.
    towards_zero = (read < 0) if up else (read > 0)
    bits = nearest.view(torch.uint8).to(torch.int16)
    stepped = torch.where(towards_zero, bits - 1, bits + 1)
    # A zero of the other sign steps to the first number on this side.
    other_zero, next_value = (0x80, 0x01) if up else (0x00, 0x81)
    stepped = torch.where(bits == other_zero, next_value, stepped)
    return torch.where(short, stepped, bits).to(torch.uint8).view(torch.float8_e4m3fn)
