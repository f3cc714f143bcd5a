"""The query of a logit: in float32, times the softmax scale."""

from __future__ import annotations

from torch import Tensor

__all__ = ["scaled_query"]


def scaled_query(query: Tensor, scale: float) -> Tensor:
    """``query`` in float32, times ``scale``; the tensor itself if neither changes it."""
    return query.float() if scale == 1 else query.float() * scale
