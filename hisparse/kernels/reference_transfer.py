"""Moving pages and tokens in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.types import PagedKV

__all__ = ["gather_pages", "gather_tokens", "scatter_tokens"]


def gather_pages(
    src: PagedKV, src_pages: Tensor, dst: PagedKV, dst_pages: Tensor, heads: int
) -> None:
    """See :func:`hisparse.kernels.gather_pages`."""
    moved = (src_pages >= 0) & (dst_pages >= 0)
    row = moved.nonzero()[:, 0]
    source, target = src_pages[moved].long(), dst_pages[moved].long()
    for src_kv, dst_kv in zip(src, dst, strict=True):
        src_heads = src_kv.shape[1]
        if dst_kv.shape[1] == src_heads:
            dst_kv[target] = _at(src_kv, source).to(dst_kv.device)
        else:
            head = row % heads * src_heads // heads
            dst_kv[target, 0] = _at(src_kv, source, head).to(dst_kv.device)


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


def _at(pages_kv: Tensor, *index: Tensor) -> Tensor:
    where: torch.device = pages_kv.device
    return pages_kv[tuple(i.to(where) for i in index)]
