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
    """``x float32`` in float32 or bfloat16, never below ``x`` if ``up``, else never above it."""
    if dtype == torch.float32:
        return x
    # The upper half of a float32 is a bfloat16, rounded towards zero.
    bits = x.contiguous().view(torch.int32)
    away = ((bits & 0xFFFF) != 0) & ((x > 0) if up else (x < 0))
    return ((bits >> 16) + away).to(torch.int16).view(torch.bfloat16)
