"""How much host memory may still be taken."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["free_host_memory"]

#: Where the kernel says what a container may take and has taken, control groups v2.
_GROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Bytes that are free on this machine, or in this container if that is less."""
    free: int = psutil.virtual_memory().available
    try:
        most = (_GROUP / "memory.max").read_text().strip()
        taken = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if most == "max" else max(0, min(free, int(most) - taken))
