"""Channel-wise ranges of keys in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["page_summary", "round_outward"]


def page_summary(keys: Tensor, summaries: Tensor, host_pages: Tensor) -> None:
    """See :func:`hisparse.kernels.page_summary`."""
    stored = (host_pages >= 0).nonzero()[:, 0]
    own = keys[stored].float()
    high = round_outward(own.amax(dim=1), summaries.dtype, up=True)
    low = round_outward(own.amin(dim=1), summaries.dtype, up=False)
    summaries[host_pages[stored].long()] = torch.cat([high, low], dim=-1)


def round_outward(x: Tensor, dtype: torch.dtype, *, up: bool) -> Tensor:
    """Convert to a narrower dtype; the result is never below ``x`` if ``up``, else never above.

    Args:
        x: ``float32``, any shape.
        dtype: float32, bfloat16 or float8_e4m3fn; for the last, x has to be within +-448.
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
    nearest = x.contiguous().to(torch.float8_e4m3fn)
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
