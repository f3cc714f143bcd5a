"""Replay of recorded selections in C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.kernels.replay.op import POLICIES, REPLAY, STACK_DEPTHS, Selections

__all__ = ["replay", "stack_depths"]


def stack_depths(selections: Selections, depth: int) -> Tensor:
    """See :func:`hisparse.kernels.stack_depths`."""
    counts = torch.zeros(len(selections.streams) - 1, depth + 1, dtype=torch.int64)
    STACK_DEPTHS.on_cpu(*selections, more=(counts, selections.num_pages))
    return counts


def replay(selections: Selections, policy: str, sizes: Sequence[int]) -> Tensor:
    """See :func:`hisparse.kernels.replay`."""
    hits = torch.zeros(len(selections.streams) - 1, len(sizes), dtype=torch.int64)
    each = torch.tensor(sizes, dtype=torch.int32)
    more = (each, hits, selections.num_pages, POLICIES.index(policy))
    REPLAY.on_cpu(*selections, more=more)
    return hits
