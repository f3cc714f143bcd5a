"""Measures free host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

__all__ = ["free_host_memory"]

#: Where control groups are mounted, and the file that names those of this process.
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

#: By the release of control groups: limit, usage, and the key of ``memory.stat`` for the part of
#: the usage that is a cache of files which nobody has read lately.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_host_memory() -> int:
    """Free bytes on this machine, or in a control group of this process if fewer."""
    free: int = psutil.virtual_memory().available
    for group, files in _memory_groups():
        free = min(free, _free_in(group, *files, otherwise=free))
    return max(0, free)


def _memory_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """This process's control groups and those around them; a container may see only the root."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, files = (_GROUPS / "memory", _V1) if controllers else (_GROUPS, _V2)
        inner = PurePosixPath(name.lstrip("/"))
        for path in (inner, *inner.parents):
            yield mount / path, files


def _free_in(group: Path, limit: str, usage: str, reclaimable: str, *, otherwise: int) -> int:
    try:
        most = int((group / limit).read_text())
        used = int((group / usage).read_text())
        lines = (group / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # No such group, or "max".
        return otherwise
    return most - used + next((int(x.split()[1]) for x in lines if x.startswith(reclaimable)), 0)
