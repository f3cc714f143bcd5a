"""Allocates the memory of pools."""

from __future__ import annotations

import contextlib
import logging
import mmap
import resource
from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.cache.page_lock import LockedMemory, is_readable_in_place, memlock_limit, page_lock
from hisparse.cache.shared_memory import NodeRanks, map_together
from hisparse.errors import CapacityError, one_line
from hisparse.units import format_bytes

__all__ = ["zeros"]

logger = logging.getLogger(__name__)


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
        ranks: processes that share this memory, each of which makes this call; None: not shared.

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
