"""Counters by which the program of a group that ends last finds out that it is the last."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["arrival_counters"]

#: Counters of a device at least: 64 KiB, more than most configurations ever need.
_MIN_COUNTERS = 1 << 14

#: By device, all that were made: a captured graph holds the address of those it was captured with.
_made: dict[torch.device, list[Tensor]] = {}


def arrival_counters(count: int, device: torch.device) -> Tensor:
    """At least ``count`` counters, ``[n] int32``, all 0 between launches.

    A kernel that counts leaves them at 0. Kernels that count have to run one after the other, so on
    one stream of a device: the forward's.
    """
    made = _made.setdefault(device, [])
    if not made or made[-1].numel() < count:
        size = max(_MIN_COUNTERS, 1 << (count - 1).bit_length())
        counters = torch.zeros(size, dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Not zero until the graph replays, so only this graph may use them.
            return counters
        made.append(counters)
    return made[-1]
