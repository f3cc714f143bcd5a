"""Logits of attention, the same in all references: scale and cap."""

from __future__ import annotations

from torch import Tensor

__all__ = ["cap_logits"]


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)`` in place, or the logits as they are if ``cap`` is 0."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits
