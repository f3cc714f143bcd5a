"""Allocates the memory of pools, which ranks of a node may share and which a GPU may read.

Memory for a GPU is mapped and page-locked here: exactly its bytes. ``torch.zeros(pin_memory=True)``
rounds each block up to a power of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from hisparse.errors import CapacityError, one_line
from hisparse.kernels.transfer.op import PIECE_BYTES
from hisparse.units import format_bytes

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: ``cudaHostRegisterPortable | cudaHostRegisterMapped``: kernels of any device read it in place.
_FLAGS = 1 | 2
#: ``CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM``.
_SAME_ADDRESS = 91
#: Bytes that a thread touches at a time: PyTorch starts no threads for so few pages.
_TOUCHED_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The processes of a node that serve one model together.

    Attributes:
        rank: number of this process on its node.
        size: processes of the node.
        gather: gives every process the texts of all, by rank; each of them calls it.
    """

    rank: int
    size: int
    gather: Callable[[str], Sequence[str]]


def zeros(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pin: bool = False,
    ranks: NodeRanks | None = None,
) -> Tensor:
    """Zeroed memory; on the CPU, committed on first touch, in huge memory pages.

    Pages of a sequence lie scattered over a pool. Huge memory pages make such reads faster, since
    fewer addresses have to be translated: 1.5 times from host memory; a whole decode step takes
    0.92 of the time with them. ``torch.zeros`` would touch the whole pool at start.

    Args:
        shape: sizes.
        dtype: dtype of the elements.
        device: where the memory is.
        pin: page-lock the memory, so that a GPU can read it; memory is then touched at once.
            Kept until the last tensor of it is gone.
        ranks: processes that share this memory, each of which makes this call, or None.

    Raises:
        CapacityError: the memory is refused; names the limits that may be the reason.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        if device.type != "cpu" or num_bytes == 0:
            return torch.zeros(shape, dtype=dtype, device=device)
        return _map(num_bytes, pin, ranks).view(dtype).view(shape)
    except (OSError, RuntimeError) as error:
        raise CapacityError(_refused(num_bytes, device, pin, error)) from error


def _map(num_bytes: int, pin: bool, ranks: NodeRanks | None) -> Tensor:
    """``[num_bytes] uint8``, mapped from the kernel."""
    if pin and not is_readable_in_place():
        logger.warning("CUDA cannot read mapped memory here: pinned memory may take twice its size")
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    if ranks is not None and ranks.size > 1:
        return map_together(
            num_bytes,
            ranks,
            lambda file: _prepare(LockedMemory(file, num_bytes, flags=mmap.MAP_SHARED), pin),
        )
    # Private: the kernel treats a shared mapping as a file, usually without huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _prepare(LockedMemory(-1, num_bytes, flags=flags), pin)


def _prepare(memory: LockedMemory, pin: bool) -> Tensor:
    """``[bytes] uint8``: a mapping in huge pages if there are any, page-locked if asked."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # This kernel has no huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if pin:
        # A forked child would get copies of pages, or take those that the device knows.
        memory.madvise(mmap.MADV_DONTFORK)
        page_lock(memory, tensor)
    return tensor


def _refused(num_bytes: int, device: torch.device, pin: bool, error: Exception) -> str:
    """One line for memory that could not be allocated."""
    if device.type != "cpu":
        kind, remedy = f"{device} memory", "lower device_memory"
    elif pin:
        kind = "page-locked host memory"
        remedy = f"lower host_memory; ulimit -l is {memlock_limit()}"
    else:
        kind, remedy = "host memory", f"lower host_memory, or raise {_limit()}"
    return f"{kind}: {format_bytes(num_bytes)} were refused ({one_line(error)}); {remedy}"


def _limit() -> str:
    """The limit that refuses memory of which there is enough."""
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        return f"the limit of addresses, {format_bytes(addresses)} (ulimit -v)"
    return "what the kernel promises (vm.overcommit_memory)"


def map_together(num_bytes: int, ranks: NodeRanks, use: Callable[[int], T]) -> T:
    """Let every rank use the descriptor of one file in memory; each of them calls this.

    The file has no name and no folder: it ends with its last mapping, also after a crash. No rank
    returns before all have mapped it.

    Args:
        num_bytes: size of the file, all zeros.
        ranks: the processes.
        use: maps the file; the descriptor is closed afterwards.

    Raises:
        OSError: in every rank, if one of them fails.
    """
    file, offered, error = -1, "", ""
    try:
        if ranks.rank == 0:
            file = os.memfd_create("hisparse")
            os.ftruncate(file, num_bytes)
            offered = f"/proc/{os.getpid()}/fd/{file}"
    except OSError as failure:
        error = one_line(failure)
    path = ranks.gather(offered)[0]
    try:
        if path:
            if ranks.rank != 0:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            result = use(file)
    except (OSError, RuntimeError, ValueError) as failure:
        error = one_line(failure)
    errors = ranks.gather(error)
    if file >= 0:
        os.close(file)
    for rank, message in enumerate(errors):
        if message:
            raise OSError(f"rank {rank}: {message}")
    return result


class LockedMemory(mmap.mmap):
    """A mapping that releases its page locks before it ends, or before the process does."""

    release: weakref.finalize[Any, Any] | None = None

    def __del__(self) -> None:
        # A finalizer would be late: mmap unmaps before it calls weak references.
        if self.release is not None:
            self.release()


def page_lock(memory: LockedMemory, tensor: Tensor) -> None:
    """Commit memory and register it with CUDA, so that kernels and copy engines reach it.

    Memory of more than ``PIECE_BYTES`` is registered in pieces that end at multiples of it.

    PyTorch asks CUDA whether memory is pinned, so ``tensor.is_pinned()`` is true and copies with
    ``non_blocking=True`` do not wait. PyTorch does not know when such a copy ends: wait for
    the device before you free the memory, as a release does.

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
    """Touch every page of ``tensor [bytes]``, by all processors of this thread, not one."""
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
