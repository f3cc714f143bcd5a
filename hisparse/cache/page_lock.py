"""Page-locks mapped memory for a GPU: exactly its bytes, while PyTorch's allocator may take twice.

``torch.zeros(pin_memory=True)`` rounds each block up to a power of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hisparse.kernels.transfer.cuda import PIECE_BYTES
from hisparse.units import format_bytes

#: ``cudaHostRegisterPortable | cudaHostRegisterMapped``: kernels of any device read it in place.
_FLAGS = 1 | 2
#: ``CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM``.
_SAME_ADDRESS = 91
#: Bytes that a thread touches at a time.
_TOUCHED_BYTES = 2**30


class LockedMemory(mmap.mmap):
    """A mapping that releases its page locks before it ends, or before the process does."""

    release: weakref.finalize[Any, Any] | None = None

    def __del__(self) -> None:
        # mmap unmaps before it tells weak references, so a finalizer alone would be late.
        if self.release is not None:
            self.release()


def page_lock(memory: LockedMemory, tensor: Tensor) -> None:
    """Commit memory and register it with CUDA, so that kernels and copy engines reach it.

    Memory of more than ``PIECE_BYTES`` is registered in pieces that end at multiples of it.

    PyTorch asks CUDA whether memory is pinned, so ``tensor.is_pinned()`` is true and copies with
    ``non_blocking=True`` do not wait. PyTorch does not know when such a copy ends: whoever frees
    the memory waits for the device first, as a release does.

    Args:
        memory: the mapping.
        tensor: ``[bytes] uint8``, all of the mapping.

    Raises:
        RuntimeError: CUDA refuses a piece; nothing stays registered.
    """
    _commit(tensor)
    runtime, begin, pages = torch.cuda.cudart(), tensor.data_ptr(), mmap.PAGESIZE
    end = begin + -(-tensor.numel() // pages) * pages
    cuts = range(begin // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES, end, PIECE_BYTES)
    bounds = [begin, *(cuts if end - begin > PIECE_BYTES else ()), end]
    locked: list[int] = []
    for first, last in pairwise(bounds):
        error = runtime.cudaHostRegister(first, last - first, _FLAGS)
        if int(error) != 0:
            _unregister(runtime, locked, os.getpid())
            _forget_error()
            raise RuntimeError(
                f"cudaHostRegister: {_describe(runtime, error)}, after "
                f"{format_bytes(first - begin)} were page-locked"
            )
        locked.append(first)
    memory.release = weakref.finalize(memory, _unregister, runtime, locked, os.getpid())


def is_readable_in_place() -> bool:
    """Whether kernels reach registered memory at its own address: not so with WSL 2, for example.

    CUDA must have been initialized.
    """
    value, device = ctypes.c_int(1), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
        driver.cuDeviceGetAttribute(ctypes.byref(value), _SAME_ADDRESS, device)
    except (OSError, AttributeError):  # Found elsewhere by PyTorch: believe in the usual answer.
        return True
    return bool(value.value)


def memlock_limit() -> str:
    """The limit of page-locked memory, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _commit(tensor: Tensor) -> None:
    """Touch every page, by all processors: CUDA would do it with one."""
    pieces = tensor.split(_TOUCHED_BYTES)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda piece: piece[:: mmap.PAGESIZE].zero_(), pieces))


def _unregister(runtime: Any, pieces: list[int], pid: int) -> None:
    """Release the pieces, last first, once the device has finished; not in a forked child."""
    if not pieces or os.getpid() != pid:
        return
    with contextlib.suppress(RuntimeError):  # The device has failed before.
        torch.cuda.synchronize()
    for begin in reversed(pieces):
        runtime.cudaHostUnregister(begin)
    pieces.clear()


def _describe(runtime: Any, error: Any) -> str:
    with contextlib.suppress(RuntimeError, TypeError):
        return str(runtime.cudaGetErrorString(error))
    return f"error {int(error)}"


def _forget_error() -> None:
    """Let this launch report the error of a registration, instead of the caller's next one."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
