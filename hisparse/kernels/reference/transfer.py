"""Moving pages and tokens in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["append_tokens", "gather_pages", "gather_tokens", "row_tokens", "scatter_tokens"]


def gather_pages(
    src: tuple[Tensor, ...],
    src_pages: Tensor,
    dst: tuple[Tensor, ...],
    dst_pages: Tensor,
    heads: int,
) -> None:
    """See :func:`hisparse.kernels.gather_pages`; one or two pools at a time."""
    # The sign bit of the disjunction is set where either is negative.
    moved = ((src_pages | dst_pages).flatten() >= 0).nonzero()[:, 0]
    source = src_pages.flatten()[moved].to(src[0].device).long()
    target = dst_pages.flatten()[moved].to(dst[0].device).long()
    src_heads = src[0].shape[-3]
    row = moved // max(src_pages.shape[1], 1)
    head = (row % heads * src_heads // heads).to(source.device)
    for src_kv, dst_kv in zip(_layers(src), _layers(dst), strict=True):
        if dst_kv.shape[1] == src_heads:
            dst_kv.index_copy_(0, target, src_kv.index_select(0, source).to(dst_kv.device))
        else:
            dst_kv[:, 0].index_copy_(0, target, src_kv[source, head].to(dst_kv.device))


def scatter_tokens(new: tuple[Tensor, ...], dst: tuple[Tensor, ...], slots: Tensor) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    slots = slots.to(dst[0].device)
    for pages_kv, tokens in zip(dst, new, strict=True):
        size = pages_kv.shape[-2]
        pages_kv[..., slots // size, :, slots % size, :] = _token_first(tokens, pages_kv)


def append_tokens(
    new: tuple[Tensor, ...],
    host: tuple[Tensor, ...],
    host_slots: Tensor,
    device: tuple[Tensor, ...],
    tail_slots: Tensor,
) -> None:
    """See :func:`hisparse.kernels.append_tokens`."""
    scatter_tokens(new, host, host_slots)
    scatter_tokens(row_tokens(new, len(tail_slots)), device, tail_slots)


def row_tokens(new: tuple[Tensor, ...], num_rows: int) -> tuple[Tensor, ...]:
    """``[T, Hkv, D]`` -> ``[R, 1, D]``, the KV head of each row; with one row a request, as is."""
    heads = num_rows // max(len(new[0]), 1)
    if heads <= 1:
        return new
    copies = heads // new[0].shape[1]
    each = new if copies == 1 else tuple(x.repeat_interleave(copies, dim=1) for x in new)
    return tuple(x.reshape(-1, 1, x.shape[-1]) for x in each)


def gather_tokens(src: tuple[Tensor, ...], slots: Tensor) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.gather_tokens`."""
    slots = slots.to(src[0].device)
    size = src[0].shape[-2]
    tokens = [pages_kv[..., slots // size, :, slots % size, :] for pages_kv in src]
    # PyTorch puts the dimension of separated indices first.
    return tuple(x if x.ndim == 3 else x.transpose(0, 1) for x in tokens)


def _layers(pools: tuple[Tensor, ...]) -> list[Tensor]:
    """``[P, H, S, D]`` of every pool and layer."""
    # PyTorch's index_copy_ has no float8.
    pools = tuple(x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in pools)
    return [each for pool in pools for each in (pool if pool.ndim == 5 else [pool])]


def _token_first(tokens: Tensor, pages_kv: Tensor) -> Tensor:
    moved = tokens if tokens.ndim == 3 else tokens.transpose(0, 1)
    return moved.to(pages_kv.device)
