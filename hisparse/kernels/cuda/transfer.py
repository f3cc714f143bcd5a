"""Moving pages and tokens on CUDA devices, by kernel or by the copy engine."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import dense_rows
from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.cuda.crossover import MIN_COPY_BYTES

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

_Pools = tuple[Tensor, ...]


def gather_pages(
    src: _Pools, src_pages: Tensor, dst: _Pools, dst_pages: Tensor, heads: int
) -> None:
    """See :func:`hisparse.kernels.gather_pages`; one or two pools at a time.

    A kernel serves lists on the device: it reads pinned host memory in place and skips a page that
    a pool does not have. Lists on the CPU, with pages on the device, go to the copy engine if the
    pages are long enough runs.

    Raises:
        KernelError: a pool has odd row widths or a strided last dimension, or is unpinned host
            memory.
    """
    device = _device(*src, *dst)
    on_device = device.type == "cuda" and "cpu" not in (
        src_pages.device.type,
        dst_pages.device.type,
    )
    if device.type == "cuda" and not on_device:
        lists = (src_pages.cpu(), dst_pages.cpu())
        if copy_pages(src, lists[0], dst, lists[1], heads):
            return
    src_pages, dst_pages = (
        dense_rows(x.to(device, non_blocking=True)) for x in (src_pages, dst_pages)
    )
    pools = (src[0], src[-1], src_pages, dst[0], dst[-1], dst_pages)
    call_cuda("gather_pages", *pools, heads, len(src))


def copy_pages(
    src: _Pools,
    src_pages: Tensor,
    dst: _Pools,
    dst_pages: Tensor,
    heads: int,
    min_copy_bytes: int = MIN_COPY_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> bool:
    """``gather_pages`` by the copy engine: pages that follow each other go in one call.

    Args:
        src: one or two pools.
        src_pages: ``[R, K] int32`` on the CPU.
        dst: as many pools.
        dst_pages: ``[R, K] int32`` on the CPU.
        heads: rows per request.
        min_copy_bytes: bytes that a call has to move on average; else nothing is copied.
        piece_bytes: no call reads or writes on both sides of a multiple of this address.

    Returns:
        Whether the pages are being copied.

    Raises:
        KernelError: as ``gather_pages``, and for a page that a pool does not have.
    """
    lists = (dense_rows(src_pages), dense_rows(dst_pages))
    pools = (src[0], src[-1], lists[0], dst[0], dst[-1], lists[1])
    return bool(call_cuda("copy_pages", *pools, heads, len(src), min_copy_bytes, piece_bytes))


def scatter_tokens(new: _Pools, dst: _Pools, slots: Tensor) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    slots = dense_rows(slots.to(_device(*new, *dst), non_blocking=True))
    call_cuda("scatter_tokens", new[0], new[-1], dst[0], dst[-1], slots, len(new))


def append_tokens(
    new: _Pools, host: _Pools, host_slots: Tensor, device: _Pools, tail_slots: Tensor
) -> None:
    """See :func:`hisparse.kernels.append_tokens`; a slot that a pool does not have is skipped."""
    pools = (host[0], host[-1], dense_rows(host_slots), device[0], device[-1])
    call_cuda("append_tokens", new[0], new[-1], *pools, dense_rows(tail_slots), len(new))


def gather_tokens(src: _Pools, slots: Tensor) -> _Pools:
    """See :func:`hisparse.kernels.gather_tokens`; the tokens lie where the slots do.

    Raises:
        KernelError: as ``gather_pages``.
    """
    slots = dense_rows(slots.to(_device(slots, *src), non_blocking=True))
    out = []
    for pool in src:
        *layers, _, heads, _, width = pool.shape
        shape = (*layers, slots.shape[0], heads, width)
        out.append(torch.empty(shape, dtype=pool.dtype, device=slots.device))
    call_cuda("gather_tokens", out[0], out[-1], src[0], src[-1], slots, len(src))
    return tuple(out)


def _device(*tensors: Tensor) -> torch.device:
    """The CUDA device among those of the tensors, else the first."""
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type == "cuda"), devices[0])
