"""Moving pages and tokens in C++."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.transfer.op import (
    GATHER_PAGES,
    GATHER_TOKENS,
    SCATTER_TOKENS,
    new_tokens,
    row_tokens,
)

__all__ = ["append_tokens", "gather_pages", "gather_tokens", "scatter_tokens"]


def gather_pages(
    src_k: Tensor,
    src_v: Tensor | None,
    src_pages: Tensor,
    dst_k: Tensor,
    dst_v: Tensor | None,
    dst_pages: Tensor,
    heads: int,
) -> None:
    """See :func:`hisparse.kernels.gather_pages`; without values only keys are moved."""
    GATHER_PAGES.on_cpu(src_k, src_v, src_pages, dst_k, dst_v, dst_pages, more=(heads,))


def scatter_tokens(
    dst_k: Tensor, dst_v: Tensor | None, k: Tensor, v: Tensor | None, slots: Tensor
) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    SCATTER_TOKENS.on_cpu(dst_k, dst_v, k, v, slots)


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
    """See :func:`hisparse.kernels.append_tokens`."""
    SCATTER_TOKENS.on_cpu(host_k, host_v, k, v, host_slots)
    k, v = row_tokens(k, v, tail_slots.shape[0])
    SCATTER_TOKENS.on_cpu(device_k, device_v, k, v, tail_slots)


def gather_tokens(
    src_k: Tensor, src_v: Tensor | None, slots: Tensor
) -> tuple[Tensor, Tensor | None]:
    """See :func:`hisparse.kernels.gather_tokens`."""
    k = new_tokens(src_k, slots)
    v = None if src_v is None else new_tokens(src_v, slots)
    GATHER_TOKENS.on_cpu(src_k, src_v, slots, more=(k, v))
    return k, v
