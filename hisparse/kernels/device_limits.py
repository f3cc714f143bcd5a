"""What a GPU offers to a kernel, and what kernels take of it that not every GPU has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hisparse.types import KVSpec

__all__ = ["DeviceLimits", "attention_shared_bytes", "device_limits"]


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


def attention_shared_bytes(kv: KVSpec) -> int:
    """Shared memory of a block of Triton's attention, as compiled for a GPU that has little.

    The largest of heads up to 256 wide, or that of latents of 512 and 64; decode and prefill.
    """
    float32 = kv.dtype == torch.float32
    if kv.latent:
        return 112_768 if float32 else 75_776
    return 51_328 if float32 else 74_752
