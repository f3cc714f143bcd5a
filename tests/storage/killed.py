"""Processes that SIGKILL ends while they work on a store."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

__all__ = ["die", "run_killed"]


def die(*_: object) -> NoReturn:
    """End this process, as the system does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


def run_killed(work: Callable[[Callable[[], None]], None], after_s: float | None = None) -> int:
    """Run ``work`` in a child that must end by SIGKILL.

    Args:
        work: gets a function that tells this process of an acknowledgement.
        after_s: seconds after the first acknowledgement when the child is killed; None: it calls
            :func:`die` itself.

    Returns:
        The number of acknowledgements.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Threads of pytest do not matter to the child.
        child = os.fork()
    if not child:
        try:
            work(lambda: _write(writing))
        finally:
            os._exit(1)
    os.close(writing)
    acknowledged = 0
    if after_s is not None:
        acknowledged = len(os.read(reading, 1))  # It has begun.
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    while more := os.read(reading, 1 << 16):
        acknowledged += len(more)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child was not killed"
    return acknowledged


def _write(fd: int) -> None:
    os.write(fd, b".")
