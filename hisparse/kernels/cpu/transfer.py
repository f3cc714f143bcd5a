"""Moving pages and tokens in C++."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.kernels.reference.transfer import row_tokens

__all__ = ["append_tokens", "gather_pages", "gather_tokens", "scatter_tokens"]


def gather_pages(
    src: tuple[Tensor, ...],
    src_pages: Tensor,
    dst: tuple[Tensor, ...],
    dst_pages: Tensor,
    heads: int,
) -> None:
    """See :func:`hisparse.kernels.gather_pages`; one or two pools at a time."""
    # With one pool, src[-1] is src[0]; the kernel then moves the first one only.
    lists = (dense_rows(src_pages), dense_rows(dst_pages))
    call_cpu("gather_pages", src[0], src[-1], lists[0], dst[0], dst[-1], lists[1], heads, len(src))


def scatter_tokens(new: tuple[Tensor, ...], dst: tuple[Tensor, ...], slots: Tensor) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    call_cpu("scatter_tokens", new[0], new[-1], dst[0], dst[-1], dense_rows(slots), len(new))


def append_tokens(
    new: tuple[Tensor, ...],
    host: tuple[Tensor, ...],
    host_slots: Tensor,
    device: tuple[Tensor, ...],
    tail_slots: Tensor,
) -> None:
    """See :func:`hisparse.kernels.append_tokens`."""
    scatter_tokens(new, host, host_slots)
    scatter_tokens(row_tokens(new, tail_slots.shape[0]), device, tail_slots)


def gather_tokens(src: tuple[Tensor, ...], slots: Tensor) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.gather_tokens`."""
    out = []
    for pool in src:
        *layers, _, heads, _, width = pool.shape
        out.append(pool.new_empty(*layers, slots.shape[0], heads, width))
    call_cpu("gather_tokens", out[0], out[-1], src[0], src[-1], dense_rows(slots), len(src))
    return tuple(out)
