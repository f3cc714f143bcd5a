"""Moving pages and tokens in C++."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels._build import call_cpu, dense_rows
from hisparse.types import PagedKV

__all__ = ["gather_pages", "gather_tokens", "scatter_tokens"]


def gather_pages(
    src: PagedKV, src_pages: Tensor, dst: PagedKV, dst_pages: Tensor, heads: int
) -> None:
    """See :func:`hisparse.kernels.gather_pages`."""
    call_cpu("gather_pages", *src, dense_rows(src_pages), *dst, dense_rows(dst_pages), heads)


def scatter_tokens(k: Tensor, v: Tensor, dst: PagedKV, slots: Tensor) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    call_cpu("scatter_tokens", k, v, *dst, dense_rows(slots))


def gather_tokens(src: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.gather_tokens`."""
    heads, _, width = src.k.shape[1:]
    k = src.k.new_empty(slots.shape[0], heads, width)
    v = src.v.new_empty(slots.shape[0], heads, src.v.shape[3])
    call_cpu("gather_tokens", k, v, *src, dense_rows(slots))
    return k, v
