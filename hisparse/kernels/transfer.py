"""Moving pages and tokens between host and device: checked entry points.

Pools are one layer's ``[P, H, S, D]`` or all layers' ``[L, P, H, S, D]``; then a call moves the
same pages or tokens in every layer. Where V is a view of K, as with MLA, whose values are the first
columns of its keys, K alone is moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_tensor
from hisparse.kernels.dispatch import implementation
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
        src: ``[Psrc, Hs, S, D]`` or ``[L, Psrc, Hs, S, D]`` pages, any strides.
        src_pages: ``[R, K] int32``.
        dst: ``[Pdst, Hd, S, D]`` or ``[L, Pdst, Hd, S, D]`` pages, any strides; Hd is Hs, or 1:
            then row r gets head ``r % heads * Hs // heads``.
        dst_pages: ``[R, K] int32``; no page twice.
        heads: rows per request.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype, or ``heads`` is not positive.
    """
    check_tensor("src_pages", src_pages, torch.int32, (None, None))
    check_tensor("dst_pages", dst_pages, torch.int32, src_pages.shape)
    for name, to, of in (("dst.k", dst.k, src.k), ("dst.v", dst.v, src.v)):
        if to.dtype != of.dtype or not _fits(to.shape, of.shape):
            raise KernelError(
                f"{name}: got pages {list(to.shape)} of {to.dtype}, expected those of the "
                f"source, {list(of.shape)} of {of.dtype}, in any number, or one head of them"
            )
    if src.k.shape[-3] != src.v.shape[-3] or dst.k.shape[-3] != dst.v.shape[-3]:
        raise KernelError(
            f"v: got {src.v.shape[-3]} heads to {dst.v.shape[-3]}, expected those of k, "
            f"{src.k.shape[-3]} to {dst.k.shape[-3]}"
        )
    if heads < 1:
        raise KernelError(f"heads: got {heads}, expected 1 or more")
    ops = implementation(impl, src.k.device, dst.k.device)
    shared = _shared(src) and _shared(dst)
    ops.gather_pages(_pools(src, shared), src_pages, _pools(dst, shared), dst_pages, heads)


def scatter_tokens(
    k: Tensor, v: Tensor, dst: PagedKV, slots: Tensor, *, impl: str = "auto"
) -> None:
    """Write token t to page ``slots[t] // S``, offset ``slots[t] % S``, all heads.

    Args:
        k: ``[T, H, Dk]`` or ``[L, T, H, Dk]``, any strides.
        v: ``[T, H, Dv]`` or ``[L, T, H, Dv]``, any strides; not read where ``dst.v`` is a view of
            ``dst.k``.
        dst: ``[P, H, S, D]`` or ``[L, P, H, S, D]`` pages, any strides.
        slots: ``[T] int64``, 0 or more; where a slot stands twice, either token may win.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    tokens = k.shape[-3]
    check_tensor("slots", slots, torch.int64, (tokens,))
    for name, new, pages in (("k", k, dst.k), ("v", v, dst.v)):
        *layers, _, heads, _, width = pages.shape
        check_tensor(name, new, pages.dtype, (*layers, tokens, heads, width))
    ops = implementation(impl, k.device, dst.k.device)
    shared = _shared(dst)
    ops.scatter_tokens((k,) if shared else (k, v), _pools(dst, shared), slots)


def gather_tokens(src: PagedKV, slots: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Read tokens from pages.

    Args:
        src: ``[P, H, S, D]`` or ``[L, P, H, S, D]`` pages, any strides.
        slots: ``[T] int64``, 0 or more.
        impl: "auto", or an implementation's name.

    Returns:
        K ``[T, H, Dk]`` and V ``[T, H, Dv]``, or ``[L, T, H, D]``, on the pages' device; V is a
        view of K where it is one in ``src``.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    check_tensor("slots", slots, torch.int64, (None,))
    ops = implementation(impl, src.k.device, slots.device)
    shared = _shared(src)
    tokens = ops.gather_tokens(_pools(src, shared), slots)
    if shared:
        return tokens[0], tokens[0][..., : src.v.shape[-1]]
    return tokens[0], tokens[1]


def _shared(kv: PagedKV) -> bool:
    """Whether V is a view of K's first columns."""
    return kv.v.data_ptr() == kv.k.data_ptr() and kv.v.shape[-1] <= kv.k.shape[-1]


def _pools(kv: PagedKV, shared: bool) -> tuple[Tensor, ...]:
    return (kv.k,) if shared else (kv.k, kv.v)


def _fits(to: torch.Size, of: torch.Size) -> bool:
    """Whether pages of shape ``to`` can take those of shape ``of``, or one head of them."""
    if len(to) != len(of) or len(to) not in (4, 5) or to[:-4] != of[:-4]:
        return False
    return to[-2:] == of[-2:] and to[-3] in (1, of[-3])
