"""What a GPU offers to kernels: its name and its shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["DeviceLimits", "device_limits"]


class DeviceLimits(NamedTuple):
    """Properties of one GPU.

    Attributes:
        name: such as "NVIDIA L40S (sm_89)".
        shared_bytes: shared memory that one block may take: 163 KiB on sm_80, 227 KiB on sm_90 and
            sm_100, 99 KiB on sm_86, sm_89 and sm_120.
    """

    name: str
    shared_bytes: int


def device_limits(device_type: str) -> DeviceLimits | None:
    """Properties of the current GPU; None if ``device_type`` is not "cuda", or without a GPU."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    # PyTorch's stubs lack the last property.
    about: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = f"{about.name} (sm_{about.major}{about.minor})"
    return DeviceLimits(name, about.shared_memory_per_block_optin)
