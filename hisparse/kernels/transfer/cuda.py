"""Moving pages to and from CUDA devices, by kernel or by the copy engine."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.transfer.op import GATHER_PAGES, cuda_device, upload

#: Page-locked memory is registered with CUDA in pieces that end at multiples of this address. CUDA
#: may refuse a copy from two registrations, so the copy engine never gets one. Drivers refuse a
#: registration of 512 GiB or more.
PIECE_BYTES = 64 * 2**30

#: Bytes that one call of the copy engine should move, on average, to be worth its fixed cost.
#: Still an estimate: some microseconds a call at 55 GB/s against 37 GB/s by kernel. The kernel has
#: reached 46.8 GB/s since; ``make gpu-check`` times the copy engine.
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
    device = cuda_device(src_k, dst_k)
    lists = (src_pages.device.type, dst_pages.device.type)
    if device.type == "cuda" and "cpu" in lists:
        on_host = (src_pages.cpu(), dst_pages.cpu())
        if copy_pages(src_k, src_v, on_host[0], dst_k, dst_v, on_host[1], heads):
            return
    src_pages, dst_pages = (upload(x, device) for x in (src_pages, dst_pages))
    GATHER_PAGES.on_cuda(src_k, src_v, src_pages, dst_k, dst_v, dst_pages, heads)


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
