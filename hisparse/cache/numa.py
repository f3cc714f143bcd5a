"""Puts the host pool of a GPU on the GPU's NUMA node.

A GPU reads the memory of another node through the link between sockets. Linux takes memory from
the node of the processor that touches it first, unless ``numactl`` sets another policy, and from
other nodes once that one is full. So the processors of the GPU's node touch the pool: unlike
``mbind``, that needs no privilege in a container.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hisparse.units import format_bytes

__all__ = ["free_bytes", "near_gpu", "pool_processors"]

logger = logging.getLogger(__name__)

_SYSTEM = Path("/sys")


@contextlib.contextmanager
def near_gpu(num_bytes: int) -> Iterator[None]:
    """Let this thread, and the threads that it starts, touch a pool by :func:`pool_processors`."""
    own = os.sched_getaffinity(0)
    processors, line = pool_processors(num_bytes, _SYSTEM)
    logger.info("%s", line)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def pool_processors(num_bytes: int, system: Path) -> tuple[set[int], str]:
    """The processors that should touch a pool, and one line that says which and why.

    They are those of the current GPU's node, if this process may use them and the node has the
    memory free; else all of this process, whose nodes then share the pool.

    Ranks that share a pool (MLA) all touch it. If their GPUs are on different nodes, the pages are
    divided between these, by which rank touches a page first: each GPU then reads about its part of
    the pool from its own node. A single node would be faster only for the GPUs of that node.

    Args:
        num_bytes: of the pool.
        system: where ``sysfs`` is mounted.
    """
    own = os.sched_getaffinity(0)
    about: Any = torch.cuda.get_device_properties()
    try:
        gpu = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    except AttributeError:
        return own, "host pool: on the nodes of all processors, that of the GPU is not known"
    node = _number(system / "bus/pci/devices" / gpu / "numa_node")
    if node is None or node < 0:
        return own, f"host pool: on the nodes of all processors, that of GPU {gpu} is not known"
    folder = system / "devices/system/node" / f"node{node}"
    near, free = own & _processors(folder / "cpulist"), free_bytes(folder)
    where = f"NUMA node {node}, that of GPU {gpu},"
    if not near:
        return own, f"host pool: not on {where} since this process has none of its processors"
    if free < num_bytes:
        left = f"has {format_bytes(free)} free of the {format_bytes(num_bytes)} needed"
        return own, f"host pool: on the nodes of all processors, since {where} {left}"
    touched = f"{format_bytes(num_bytes)} touched first by the {len(near)} processors of"
    return near, f"host pool: {touched} {where.rstrip(',')}"


def free_bytes(node: Path) -> int:
    """Free memory of a node, from its folder in ``sysfs``; 0 if it does not say."""
    try:
        found = re.search(r"MemFree:\s+(\d+) kB", (node / "meminfo").read_text())
    except OSError:
        found = None
    return 1024 * int(found[1]) if found else 0


def _processors(cpulist: Path) -> set[int]:
    """Numbers in a list such as ``0-3,8``."""
    try:
        ranges = re.findall(r"(\d+)(?:-(\d+))?", cpulist.read_text())
    except OSError:
        return set()
    return {i for first, last in ranges for i in range(int(first), int(last or first) + 1)}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
