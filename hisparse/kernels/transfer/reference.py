"""Moving pages and tokens in plain PyTorch: the oracle of the other implementations."""

import torch
from torch import Tensor

from hisparse.kernels.transfer.op import MovedKV, row_tokens


def gather_pages(
    src: MovedKV, src_pages: Tensor, dst: MovedKV, dst_pages: Tensor, heads: int
) -> None:
    """See :func:`hisparse.kernels.gather_pages`; without values only keys are moved."""
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


def scatter_tokens(dst: MovedKV, tokens: MovedKV, slots: Tensor) -> None:
    """See :func:`hisparse.kernels.scatter_tokens`; consecutive slots may share a token."""
    slots, size = slots.to(dst[0].device), dst[0].shape[-2]
    for pages_kv, x in zip(dst, tokens, strict=True):
        if pages_kv is not None and x is not None:
            moved = x if x.ndim == 3 else x.transpose(0, 1)
            moved = moved.repeat_interleave(len(slots) // max(len(moved), 1), 0)
            pages_kv[..., slots // size, :, slots % size, :] = moved.to(pages_kv.device)


def append_tokens(
    host: MovedKV, tokens: MovedKV, host_slots: Tensor, device: MovedKV, tail_slots: Tensor
) -> None:
    """See :func:`hisparse.kernels.append_tokens`."""
    scatter_tokens(host, tokens, host_slots)
    scatter_tokens(device, row_tokens(tokens, len(tail_slots)), tail_slots)


def gather_tokens(src: MovedKV, slots: Tensor, tokens: MovedKV) -> None:
    """See :func:`hisparse.kernels.gather_tokens`."""
    slots, size = slots.to(src[0].device), src[0].shape[-2]
    for pages_kv, to in zip(src, tokens, strict=True):
        if pages_kv is not None and to is not None:
            x = pages_kv[..., slots // size, :, slots % size, :]
            # PyTorch puts the dimension of separated indices first.
            to.copy_(x if x.ndim == 3 else x.transpose(0, 1))


def _layers(pools: MovedKV) -> list[Tensor]:
    """``[P, H, S, D]`` of every pool and layer."""
    # PyTorch's index_copy_ has no float8.
    some = (x for x in pools if x is not None)
    as_bytes = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in some)
    return [each for pool in as_bytes for each in (pool if pool.ndim == 5 else [pool])]
