"""The process of this test session that forks servers: see :mod:`hisparse_bench.fork_server`."""

from __future__ import annotations

import functools
import os
import threading

from hisparse_bench.fork_server import ForkServer

_lock = threading.Lock()


def fork_server() -> ForkServer:
    """Started on first use, also if two threads start servers at once; stopped by conftest.py."""
    with _lock:
        return _started()


def is_started() -> bool:
    """Whether there is one."""
    return bool(_started.cache_info().currsize)


@functools.cache
def _started() -> ForkServer:
    quick = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # Compiling a few small functions takes longer than running them.
    return ForkServer(os.environ | quick | {"TORCHDYNAMO_DISABLE": "1"})
