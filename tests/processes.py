"""Processes of tests: killed ones, those of another user, and what a full disk is to them."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

#: A user who owns nothing.
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def is_running(process: psutil.Process | int) -> bool:
    """Whether it runs; one that has ended but that nobody has waited for does not.

    A container may have nobody who waits for the children of a process that has ended.
    """
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _fork(work: Callable[[Callable[[bytes], object]], object]) -> tuple[int, int]:
    """Run ``work`` in a child, with a function that writes to a pipe.

    Returns:
        The child's process id and the end of the pipe that reads.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Threads of pytest do not matter to the child.
        child = os.fork()
    if not child:
        try:
            work(lambda data: os.write(writing, data))
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


def die(*_: object) -> NoReturn:
    """End this process, as the system does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


def run_killed(work: Callable[[Callable[[], object]], object]) -> int:
    """Run ``work`` in a child that must call :func:`die`.

    Args:
        work: gets a function that tells this process of an acknowledgement.

    Returns:
        The number of acknowledgements.
    """
    child, reading = _fork(lambda write: work(lambda: write(b".")))
    acknowledged = 0
    while more := os.read(reading, 1 << 16):
        acknowledged += len(more)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child was not killed"
    return acknowledged


def as_nobody(work: Callable[[], object]) -> str:
    """What ``work`` returns, or its exception and message, in a process of another user."""

    def answer(write: Callable[[bytes], object]) -> None:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        write(text.encode())

    child, reading = _fork(answer)
    with os.fdopen(reading, encoding="utf-8") as answered:
        text = answered.read()
    os.waitpid(child, 0)
    return text


@contextlib.contextmanager
def folder_for_all() -> Iterator[Path]:
    """A folder that all users can look into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process and its children end at so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_until(
    is_done: Callable[[], object], otherwise: str = "it did not happen", timeout_s: float = 60
) -> None:
    """Wait for what another thread or process does; a failure says ``otherwise``."""
    end = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)
