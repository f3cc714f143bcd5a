"""Moving pages between host and device: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import reference_transfer
from hisparse.kernels._check import check_tensor
from hisparse.types import PagedKV

__all__ = ["gather_pages", "gather_tokens", "scatter_tokens"]


def gather_pages(
    src: PagedKV, src_pages: Tensor, dst: PagedKV, dst_pages: Tensor, *, heads: int = 1
) -> None:
    """Copy page ``src_pages[r, i]`` to page ``dst_pages[r, i]`` wherever both are >= 0.

    Args:
        src: ``[Psrc, Hs, S, D]`` pages, any strides.
        src_pages: ``[R, K] int32``.
        dst: ``[Pdst, Hd, S, D]`` pages; Hd is Hs, or 1: then row r gets head
            ``r % heads * Hs // heads``.
        dst_pages: ``[R, K] int32``; no page twice.
        heads: rows per request.
    """
    check_tensor("src_pages", src_pages, torch.int32, (None, None))
    check_tensor("dst_pages", dst_pages, torch.int32, tuple(src_pages.shape))
    for name, a, b in (("dst.k", dst.k, src.k), ("dst.v", dst.v, src.v)):
        if a.shape[1] not in (1, b.shape[1]) or a.shape[2:] != b.shape[2:] or a.dtype != b.dtype:
            raise KernelError(
                f"{name}: got pages {list(a.shape[1:])} of {a.dtype}, expected "
                f"{list(b.shape[1:])} of {b.dtype} as in the source, or one head of it"
            )
    reference_transfer.gather_pages(src, src_pages, dst, dst_pages, heads)


def scatter_tokens(k: Tensor, v: Tensor, dst: PagedKV, slots: Tensor) -> None:
    """Write token t to page ``slots[t] // S``, offset ``slots[t] % S``, all heads.

    Args:
        k, v: ``[T, H, D]``.
        dst: ``[P, H, S, D]`` pages, any strides.
        slots: ``[T] int64``.
    """
    check_tensor("slots", slots, torch.int64, (k.shape[0],))
    for name, new, pages in (("k", k, dst.k), ("v", v, dst.v)):
        heads, _, width = pages.shape[1:]
        check_tensor(name, new, pages.dtype, (slots.shape[0], heads, width))
    reference_transfer.scatter_tokens(k, v, dst, slots)


def gather_tokens(src: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Read tokens from pages: ``slots [T] int64`` -> K and V, each ``[T, H, D]``."""
    check_tensor("slots", slots, torch.int64, (None,))
    return reference_transfer.gather_tokens(src, slots)
