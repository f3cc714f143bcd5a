"""Replay of recorded selections in C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu
from hisparse.kernels.recorded import POLICIES, Selections

__all__ = ["replay", "stack_depths"]


def stack_depths(selections: Selections, depth: int) -> Tensor:
    """See :func:`hisparse.kernels.stack_depths`."""
    counts = torch.zeros(len(selections.streams) - 1, depth + 1, dtype=torch.int64)
    tensors = (x.contiguous() for x in selections)
    call_cpu("stack_depths", *tensors, counts, selections.num_pages)
    return counts


def replay(selections: Selections, policy: str, sizes: Sequence[int]) -> Tensor:
    """See :func:`hisparse.kernels.replay`."""
    hits = torch.zeros(len(selections.streams) - 1, len(sizes), dtype=torch.int64)
    tensors = (x.contiguous() for x in selections)
    each = torch.tensor(sizes, dtype=torch.int32)
    call_cpu("replay", *tensors, each, hits, selections.num_pages, POLICIES.index(policy))
    return hits
