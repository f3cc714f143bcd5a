"""Moving pages and tokens on CUDA devices, by kernel or by the copy engine."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.transfer.op import (
    APPEND_TOKENS,
    GATHER_PAGES,
    GATHER_TOKENS,
    SCATTER_TOKENS,
    new_tokens,
)

__all__ = [
    "PIECE_BYTES",
    "append_tokens",
    "copy_pages",
    "gather_pages",
    "gather_tokens",
    "scatter_tokens",
]

#: Page-locked memory is registered with CUDA in pieces that end at multiples of this address. CUDA
#: may refuse a copy from two registrations, so the copy engine never gets one. Drivers refuse a
#: registration of 512 GiB or more.
PIECE_BYTES = 64 * 2**30

#: Bytes that one call of the copy engine should move, on average, to be worth its fixed cost.
#: An estimate (some microseconds a call at 55 GB/s against 37 GB/s by kernel), not a measurement:
#: ``make gpu-check`` measures it.
MIN_COPY_BYTES = 256 * 1024


def gather_pages(
    src_k: Tensor,
    src_v: Tensor | None,
    src_pages: Tensor,
    dst_k: Tensor,
    dst_v: Tensor | None,
    dst_pages: Tensor,
    heads: int,
) -> None:
    """See :func:`hisparse.kernels.gather_pages`; without values only keys are moved.

    A kernel serves lists on the device: it reads pinned host memory in place and skips a page that
    a pool does not have. Lists on the CPU, with pages on the device, go to the copy engine if the
    pages are long enough runs.

    Raises:
        KernelError: a pool has odd row widths or a strided last dimension, or is unpinned host
            memory.
    """
    device = _device(src_k, dst_k)
    lists = (src_pages.device.type, dst_pages.device.type)
    if device.type == "cuda" and "cpu" in lists:
        on_host = (src_pages.cpu(), dst_pages.cpu())
        if copy_pages(src_k, src_v, on_host[0], dst_k, dst_v, on_host[1], heads):
            return
    src_pages, dst_pages = (x.to(device, non_blocking=True) for x in (src_pages, dst_pages))
    GATHER_PAGES.on_cuda(src_k, src_v, src_pages, dst_k, dst_v, dst_pages, more=(heads,))


def copy_pages(
    src_k: Tensor,
    src_v: Tensor | None,
    src_pages: Tensor,
    dst_k: Tensor,
    dst_v: Tensor | None,
    dst_pages: Tensor,
    heads: int,
    limits: tuple[int, int] = (MIN_COPY_BYTES, PIECE_BYTES),
) -> bool:
    """``gather_pages`` by the copy engine: pages that follow each other go in one call.

    Args:
        src_k, src_v, dst_k, dst_v, heads: as ``gather_pages``.
        src_pages: ``[R, K] int32`` on the CPU.
        dst_pages: ``[R, K] int32`` on the CPU.
        limits: bytes that a call has to move on average, else nothing is copied; and no call reads
            or writes on both sides of a multiple of the second number.

    Returns:
        Whether the pages are being copied.

    Raises:
        KernelError: as ``gather_pages``, and for a page that a pool does not have.
    """
    tensors = GATHER_PAGES.native((src_k, src_v, src_pages, dst_k, dst_v, dst_pages))
    return bool(call_cuda("copy_pages", *tensors, heads, *limits))


def scatter_tokens(
    dst_k: Tensor, dst_v: Tensor | None, k: Tensor, v: Tensor | None, slots: Tensor
) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    slots = slots.to(_device(k, dst_k), non_blocking=True)
    SCATTER_TOKENS.on_cuda(dst_k, dst_v, k, v, slots)


def append_tokens(
    host_k: Tensor,
    host_v: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    host_slots: Tensor,
    device_k: Tensor,
    device_v: Tensor | None,
    tail_slots: Tensor,
) -> None:
    """See :func:`hisparse.kernels.append_tokens`; a slot that a pool does not have is skipped."""
    host = (host_k, host_v, k, v, host_slots)
    APPEND_TOKENS.on_cuda(*host, device_k, device_v, tail_slots)


def gather_tokens(
    src_k: Tensor, src_v: Tensor | None, slots: Tensor
) -> tuple[Tensor, Tensor | None]:
    """See :func:`hisparse.kernels.gather_tokens`; the tokens lie where the slots do.

    Raises:
        KernelError: as ``gather_pages``.
    """
    slots = slots.to(_device(slots, src_k), non_blocking=True)
    k = new_tokens(src_k, slots)
    v = None if src_v is None else new_tokens(src_v, slots)
    GATHER_TOKENS.on_cuda(src_k, src_v, slots, more=(k, v))
    return k, v


def _device(*tensors: Tensor) -> torch.device:
    """The CUDA device among those of the tensors, else the first."""
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type == "cuda"), devices[0])
