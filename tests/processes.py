"""Whether a process of a test still runs."""

from __future__ import annotations

import psutil

__all__ = ["is_running"]


def is_running(process: psutil.Process | int) -> bool:
    """Whether it runs; one that has ended but that nobody has waited for does not.

    A container may have nobody who waits for the children of a process that has ended.
    """
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
