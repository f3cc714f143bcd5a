"""Another user of the machine, for tests that run as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["NOBODY", "as_nobody", "folder_for_all", "needs_root"]

#: A user who owns nothing.
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_nobody(work: Callable[[], object]) -> str:
    """What ``work`` returns, or its exception and message, in a process of another user."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Threads of pytest do not matter to the child.
        child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as answer:
        text = answer.read()
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
