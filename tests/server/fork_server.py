"""The process of this test session that forks servers: see :mod:`hisparse_bench.fork_server`."""

from __future__ import annotations

import functools
import os

from hisparse_bench.fork_server import ForkedProcess, ForkServer

__all__ = ["ForkedProcess", "fork_server"]


@functools.cache
def fork_server() -> ForkServer:
    """Started on first use and stopped by conftest.py."""
    quick = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # Compiling a few small functions takes longer than running them.
    return ForkServer(os.environ | quick | {"TORCHDYNAMO_DISABLE": "1"})
