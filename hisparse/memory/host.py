"""Measures free host memory."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

#: Where control groups are mounted, and the file that names those of this process.
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """Names of a control group's files, and of entries in its ``memory.stat``.

    Attributes:
        limits: limits of memory, the usage and the caches of files included.
        usage: memory in use, caches of files included.
        cached: entries with caches of files, such as weights that were just read.
        unwritten: entries with the part of the caches that is not on disk yet.
    """

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, str]
    unwritten: tuple[str, str]


_V1 = _Files(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    cached=("total_inactive_file", "total_active_file"),
    unwritten=("total_dirty", "total_writeback"),
)
_V2 = _Files(
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    cached=("inactive_file", "active_file"),
    unwritten=("file_dirty", "file_writeback"),
)


def free_host_memory() -> int:
    """Free bytes on this machine, or in a control group of this process if fewer."""
    free: int = psutil.virtual_memory().available
    for group, files in _memory_groups():
        free = min(free, _free_in(group, files, otherwise=free))
    return max(0, free)


def _memory_groups() -> Iterator[tuple[Path, _Files]]:
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


def _free_in(group: Path, files: _Files, *, otherwise: int) -> int:
    """What a group's limits leave; caches of files are free, since the kernel drops them first."""
    most = [number for name in files.limits if (number := _number(group / name)) is not None]
    used = _number(group / files.usage)
    if not most or used is None:  # No such group, or no limit.
        return otherwise
    stat = _stat(group)
    cached = sum(stat.get(key, 0) for key in files.cached)
    cached -= sum(stat.get(key, 0) for key in files.unwritten)
    return min(most) - max(0, used - max(0, cached))


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or "max" in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(group: Path) -> dict[str, int]:
    """Bytes by name in ``memory.stat``."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    entries = (line.split() for line in lines)
    return {entry[0]: int(entry[1]) for entry in entries if len(entry) == 2 and entry[1].isdigit()}
