"""The shared memory of a GPU, by which kernels choose how much they fetch ahead."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LARGEST_SHARED", "shared_bytes"]

#: Of sm_80. GPUs with less (sm_86, sm_89, sm_120) have 99 KiB.
LARGEST_SHARED = 163 << 10


def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return LARGEST_SHARED
    about: Any = torch.cuda.get_device_properties(device)
    return int(about.shared_memory_per_block_optin)
