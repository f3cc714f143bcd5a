"""Memory that is refused: one line that names the size, the limit and the remedy."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.cache.allocate import zeros
from hisparse.errors import CapacityError

CPU = torch.device("cpu")


def refusal(num_bytes: int, **options: Any) -> str:
    with pytest.raises(CapacityError) as refused:
        zeros([num_bytes], torch.uint8, **({"device": CPU} | options))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_limit_of_addresses() -> None:
    """A real one: the kernel refuses the mapping."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), before[1]))
    try:
        message = refusal(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert message.startswith("host memory: 1 GiB were refused (OSError: [Errno 12]")
    assert "lower host_memory, or raise the limit of addresses, " in message
    assert message.endswith("B (ulimit -v)")


def test_what_the_kernel_does_not_promise() -> None:
    """More than 47 bits of addresses, which no machine of today has."""
    assert refusal(1 << 50).endswith("or raise what the kernel promises (vm.overcommit_memory)")


def test_what_cuda_refuses_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated where PyTorch asks CUDA, so that it runs without a GPU."""

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(torch, "zeros", refuse)
    assert refusal(3 << 30, device=torch.device("cuda", 0)) == (
        "cuda:0 memory: 3 GiB were refused (OutOfMemoryError: CUDA error: out of memory); "
        "lower device_memory"
    )
