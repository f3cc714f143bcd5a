"""Moving pages and tokens in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

from torch import Tensor

from hisparse.types import PagedKV

__all__ = ["gather_pages", "gather_tokens", "scatter_tokens"]


def gather_pages(
    src: PagedKV, src_pages: Tensor, dst: PagedKV, dst_pages: Tensor, heads: int
) -> None:
    """See :func:`hisparse.kernels.gather_pages`."""
    # The sign bit of the disjunction is set where either is negative.
    moved = ((src_pages | dst_pages).flatten() >= 0).nonzero()[:, 0]
    source = src_pages.flatten()[moved].to(src.k.device).long()
    target = dst_pages.flatten()[moved].to(dst.k.device).long()
    src_heads = src.k.shape[1]
    if dst.k.shape[1] != src_heads:
        row = moved // max(src_pages.shape[1], 1)
        head = (row % heads * src_heads // heads).to(src.k.device)
    for src_kv, dst_kv in zip(src, dst, strict=True):
        if dst_kv.shape[1] == src_heads:
            dst_kv.index_copy_(0, target, src_kv.index_select(0, source).to(dst_kv.device))
        else:
            dst_kv[:, 0].index_copy_(0, target, src_kv[source, head].to(dst_kv.device))


def scatter_tokens(k: Tensor, v: Tensor, dst: PagedKV, slots: Tensor) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    slots = slots.to(dst.k.device)
    for pages_kv, new in zip(dst, (k, v), strict=True):
        size = pages_kv.shape[2]
        pages_kv[slots // size, :, slots % size] = new.to(pages_kv.device)


def gather_tokens(src: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.gather_tokens`."""
    slots = slots.to(src.k.device)
    size = src.k.shape[2]
    k, v = (pages_kv[slots // size, :, slots % size] for pages_kv in src)
    return k, v
