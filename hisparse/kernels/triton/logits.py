"""The cap on logits in Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cap_logits"]


@triton.jit
def cap_logits(logits, CAP: tl.constexpr):
    """``CAP * tanh(logits / CAP)`` by an exponential that cannot overflow; Triton has no tanh."""
    decay = tl.exp(tl.abs(logits) * (-2.0 / CAP))
    capped = CAP * (1.0 - decay) / (1.0 + decay)
    return tl.where(logits < 0, -capped, capped)
