"""Moving pages and tokens in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.transfer.op import row_tokens


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
    # The sign bit of the disjunction is set where either is negative.
    moved = ((src_pages | dst_pages).flatten() >= 0).nonzero()[:, 0]
    source = src_pages.flatten()[moved].to(src_k.device).long()
    target = dst_pages.flatten()[moved].to(dst_k.device).long()
    src_heads = src_k.shape[-3]
    row = moved // max(src_pages.shape[1], 1)
    head = (row % heads * src_heads // heads).to(source.device)
    for src_kv, dst_kv in zip(_layers(src_k, src_v), _layers(dst_k, dst_v), strict=True):
        if dst_kv.shape[1] == src_heads:
            dst_kv.index_copy_(0, target, src_kv.index_select(0, source).to(dst_kv.device))
        else:
            dst_kv[:, 0].index_copy_(0, target, src_kv[source, head].to(dst_kv.device))


def scatter_tokens(
    dst_k: Tensor, dst_v: Tensor | None, k: Tensor, v: Tensor | None, slots: Tensor
) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`."""
    slots = slots.to(dst_k.device)
    for pages_kv, tokens in ((dst_k, k), (dst_v, v)):
        if pages_kv is not None and tokens is not None:
            size = pages_kv.shape[-2]
            pages_kv[..., slots // size, :, slots % size, :] = _token_first(tokens, pages_kv)


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
    scatter_tokens(host_k, host_v, k, v, host_slots)
    k, v = row_tokens(k, v, len(tail_slots))
    scatter_tokens(device_k, device_v, k, v, tail_slots)


def gather_tokens(
    src_k: Tensor, src_v: Tensor | None, slots: Tensor, k: Tensor, v: Tensor | None
) -> None:
    """See :func:`hisparse.kernels.gather_tokens`."""
    slots = slots.to(src_k.device)
    size = src_k.shape[-2]
    for pages_kv, tokens in ((src_k, k), (src_v, v)):
        if pages_kv is not None and tokens is not None:
            x = pages_kv[..., slots // size, :, slots % size, :]
            # PyTorch puts the dimension of separated indices first.
            tokens.copy_(x if x.ndim == 3 else x.transpose(0, 1))


def _layers(*pools: Tensor | None) -> list[Tensor]:
    """``[P, H, S, D]`` of every pool and layer."""
    # PyTorch's index_copy_ has no float8.
    some = (x for x in pools if x is not None)
    as_bytes = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in some)
    return [each for pool in as_bytes for each in (pool if pool.ndim == 5 else [pool])]


def _token_first(tokens: Tensor, pages_kv: Tensor) -> Tensor:
    moved = tokens if tokens.ndim == 3 else tokens.transpose(0, 1)
    return moved.to(pages_kv.device)
