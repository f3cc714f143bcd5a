"""Checks of the GPU, of host memory, of pinning and of NUMA nodes."""

from __future__ import annotations

import re
from pathlib import Path

from hisparse.cache.allocate import zeros
from hisparse.cache.page_lock import memlock_limit
from hisparse.config import HiSparseConfig
from hisparse.doctor.check import Check
from hisparse.errors import CapacityError
from hisparse.memory.host import free_host_memory
from hisparse.units import format_bytes, resolve_memory

#: With less free memory, a server can hardly hold its own processes.
_LITTLE_BYTES = 4 * 2**30

_NODES = Path("/sys/devices/system/node")


def device() -> list[Check]:
    """The GPUs that PyTorch finds."""
    import torch

    if not torch.cuda.is_available():
        message = "PyTorch finds no CUDA GPU, so SGLang serves on the CPU, which is for tests only"
        remedy = "on a machine with a GPU: check nvidia-smi, and that torch is a CUDA build"
        return [Check(name="device", status="warning", message=message, remedy=remedy)]
    checks = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = format_bytes(torch.cuda.mem_get_info(index)[0])
        message = f"{about.name}, sm_{about.major}{about.minor}, {free} free of "
        message += format_bytes(about.total_memory)
        checks.append(Check(name=f"device {index}", status="ok", message=message))
    return checks


def pinned_memory() -> list[Check]:
    """Whether host memory can be pinned for a GPU."""
    import torch

    message = f"ulimit -l is {memlock_limit()}"
    if not torch.cuda.is_available():
        message += "; without a GPU nothing is pinned"
        return [Check(name="pinned memory", status="ok", message=message)]
    try:
        zeros([2**26], torch.uint8, torch.device("cpu"), pin=True)
    except CapacityError as error:
        message += f"; 64 MiB could not be pinned: {error}"
        remedy = "ulimit -l unlimited; in a container --ulimit memlock=-1"
        return [Check(name="pinned memory", status="error", message=message, remedy=remedy)]
    message += "; 64 MiB could be pinned"
    return [Check(name="pinned memory", status="ok", message=message)]


def host_memory() -> list[Check]:
    """Free host memory, and how much of it a server takes by default."""
    free, default = free_host_memory(), HiSparseConfig().host_memory
    pool = format_bytes(resolve_memory(default, free, "host_memory"))
    message = f"{format_bytes(free)} free; host_memory {default} would take {pool} for the KV cache"
    if free < _LITTLE_BYTES:
        remedy = "free some memory, or set host_memory and --max-total-tokens"
        return [Check(name="host memory", status="warning", message=message, remedy=remedy)]
    return [Check(name="host memory", status="ok", message=message)]


def numa(nodes: Path = _NODES) -> list[Check]:
    """NUMA nodes and their free memory."""
    sizes = {}
    for meminfo in nodes.glob("node[0-9]*/meminfo"):
        if match := re.search(r"MemFree:\s+(\d+) kB", meminfo.read_text()):
            sizes[int(meminfo.parent.name.removeprefix("node"))] = 1024 * int(match[1])
    if len(sizes) < 2:
        return [Check(name="numa", status="ok", message="one node")]
    message = ", ".join(f"node {node}: {format_bytes(sizes[node])} free" for node in sorted(sizes))
    remedy = "start the server with numactl --interleave=all, or bound to the node of its GPUs"
    return [Check(name="numa", status="warning", message=message, remedy=remedy)]
