"""Measures free host memory."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["free_host_memory"]

#: Directory with the memory limit and usage of a container, control groups v2.
_GROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Free bytes on this machine, or in this container if fewer."""
    free: int = psutil.virtual_memory().available
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
