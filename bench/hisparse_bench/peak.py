"""What the processor can do at most: multiply-adds in registers, and plain reads of memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hisparse.errors import ConfigError
from hisparse.kernels.build.compiler import SOURCES, CannotBuildError
from hisparse.kernels.build.cpu import build_cpu_library

#: Pieces of work for each thread, and rounds of a piece, each of some hundred multiply-adds: about
#: a millisecond in all.
_ITEMS, _ROUNDS = 16, 5000


@functools.cache
def _library() -> Any:
    try:
        import tvm_ffi

        kernels = SOURCES / "cpu"
        sources = [Path(__file__).with_name("peak.cpp"), kernels / "parallel.cpp"]
        headers = sorted(kernels.glob("*.h"))
        path = build_cpu_library("peak", "the limits' loops", sources, headers=headers)
        return tvm_ffi.load_module(str(path))
    except (ImportError, OSError, CannotBuildError) as error:
        raise ConfigError(
            f"the limits of the processor cannot be measured: {error}; expected g++ and "
            "apache-tvm-ffi, as for the kernels"
        ) from None


def multiply_add(threads: int) -> int:
    """Run float32 multiply-adds on threads; returns how many, of all threads together."""
    items = _ITEMS * threads
    _library().multiply_add(items, _ROUNDS, threads)
    return int(items * _ROUNDS * _library().multiply_adds_per_round())


def read(tensors: Sequence[Tensor], threads: int) -> None:
    """Read contiguous tensors on the CPU from the first byte to the last."""
    for tensor in tensors:
        _library().read(tensor, threads)
