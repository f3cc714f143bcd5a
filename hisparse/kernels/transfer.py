"""Moving pages and tokens between host and device: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels._check import check_tensor
from hisparse.kernels._impl import implementation
from hisparse.types import PagedKV

__all__ = ["gather_pages", "gather_tokens", "scatter_tokens"]


def gather_pages(
    src: PagedKV,
    src_pages: Tensor,
    dst: PagedKV,
    dst_pages: Tensor,
    *,
    heads: int = 1,
    impl: str = "auto",
) -> None:
    """Copy page ``src_pages[r, i]`` to page ``dst_pages[r, i]`` wherever both are >= 0.

    Args:
        src: ``[Psrc, Hs, S, D]`` pages, any strides.
        src_pages: ``[R, K] int32``.
        dst: ``[Pdst, Hd, S, D]`` pages, any strides; Hd is Hs, or 1: then row r gets head
            ``r % heads * Hs // heads``.
        dst_pages: ``[R, K] int32``; no page twice.
        heads: rows per request.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype, or ``heads`` is not positive.
    """
    check_tensor("src_pages", src_pages, torch.int32, (None, None))
    check_tensor("dst_pages", dst_pages, torch.int32, src_pages.shape)
    for name, to, of in (("dst.k", dst.k, src.k), ("dst.v", dst.v, src.v)):
        got, expected = to.shape[1:], of.shape[1:]
        fits = got == expected or (got[:1] == (1,) and got[1:] == expected[1:])
        if to.ndim != 4 or not fits or to.dtype != of.dtype:
            raise KernelError(
                f"{name}: got pages {list(got)} of {to.dtype}, expected "
                f"{list(expected)} of {of.dtype} as in the source, or one head of it"
            )
    if src.k.shape[1] != src.v.shape[1] or dst.k.shape[1] != dst.v.shape[1]:
        raise KernelError(
            f"v: got {src.v.shape[1]} heads to {dst.v.shape[1]}, expected those of k, "
            f"{src.k.shape[1]} to {dst.k.shape[1]}"
        )
    if heads < 1:
        raise KernelError(f"heads: got {heads}, expected 1 or more")
    ops = implementation(impl, src.k.device, dst.k.device)
    ops.gather_pages(src, src_pages, dst, dst_pages, heads)


def scatter_tokens(
    k: Tensor, v: Tensor, dst: PagedKV, slots: Tensor, *, impl: str = "auto"
) -> None:
    """Write token t to page ``slots[t] // S``, offset ``slots[t] % S``, all heads.

    Args:
        k: ``[T, H, Dk]``, any strides.
        v: ``[T, H, Dv]``, any strides.
        dst: ``[P, H, S, D]`` pages, any strides.
        slots: ``[T] int64``, 0 or more; where a slot stands twice, either token may win.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    check_tensor("slots", slots, torch.int64, (k.shape[0],))
    for name, new, pages in (("k", k, dst.k), ("v", v, dst.v)):
        heads, _, width = pages.shape[1:]
        check_tensor(name, new, pages.dtype, (slots.shape[0], heads, width))
    ops = implementation(impl, k.device, dst.k.device)
    ops.scatter_tokens(k, v, dst, slots)


def gather_tokens(src: PagedKV, slots: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Read tokens from pages.

    Args:
        src: ``[P, H, S, D]`` pages, any strides.
        slots: ``[T] int64``, 0 or more.
        impl: "auto", or an implementation's name.

    Returns:
        K ``[T, H, Dk]`` and V ``[T, H, Dv]`` on the pages' device.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    check_tensor("slots", slots, torch.int64, (None,))
    ops = implementation(impl, src.k.device, slots.device)
    tokens: tuple[Tensor, Tensor] = ops.gather_tokens(src, slots)
    return tokens
