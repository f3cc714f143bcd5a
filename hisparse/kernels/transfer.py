"""Moving pages and tokens between host and device: checked entry points.

Pools are one layer's ``[P, H, S, D]`` or all layers' ``[L, P, H, S, D]``. With all layers' pools, a
call moves the same pages or tokens in every layer. Where V is a view of K, as with MLA, whose
values are the first columns of its keys, only K is moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_device, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.types import PagedKV

__all__ = ["append_tokens", "gather_pages", "gather_tokens", "scatter_tokens"]

_I32, _I64 = torch.int32, torch.int64
_CPU = torch.device("cpu")


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
        src_pages: ``[R, K] int32``, on the CPU or on the device of a pool.
        dst: ``[Pdst, Hd, S, D]`` or ``[L, Pdst, Hd, S, D]`` pages, any strides. Written to. Hd is
            Hs, or 1: then row r gets head ``r % heads * Hs // heads``.
        dst_pages: ``[R, K] int32``, on the CPU or on the device of a pool; no page twice.
        heads: rows per request.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or ``heads`` is not positive.
    """
    check_once(_check_gather, *src, src_pages, *dst, dst_pages)
    if heads < 1:
        raise KernelError(f"heads: got {heads}, expected 1 or more")
    ops = implementation(impl, src.k.device, dst.k.device)
    shared = _shares_memory(src) and _shares_memory(dst)
    ops.gather_pages(_pools(src, shared), src_pages, _pools(dst, shared), dst_pages, heads)


def scatter_tokens(
    k: Tensor, v: Tensor, dst: PagedKV, slots: Tensor, *, impl: str = "auto"
) -> None:
    """Write token t to page ``slots[t] // S``, offset ``slots[t] % S``, all heads.

    Args:
        k: ``[T, H, Dk]`` or ``[L, T, H, Dk]``, any strides.
        v: ``[T, H, Dv]`` or ``[L, T, H, Dv]``, any strides; not read where ``dst.v`` is a view of
            ``dst.k``.
        dst: ``[P, H, S, D]`` or ``[L, P, H, S, D]`` pages, any strides. Written to.
        slots: ``[T] int64``, 0 or more; if a slot stands twice, either token may win. On the CPU,
            or on the device of ``k`` or ``dst``.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_scatter, k, v, *dst, slots)
    ops = implementation(impl, k.device, dst.k.device)
    shared = _shares_memory(dst)
    ops.scatter_tokens((k,) if shared else (k, v), _pools(dst, shared), slots)


def append_tokens(
    k: Tensor,
    v: Tensor,
    host: PagedKV,
    host_slots: Tensor,
    device: PagedKV,
    tail_slots: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Write each request's new token to its host slot and to the tail pages of its rows.

    Args:
        k: ``[T, H, Dk]``, any strides.
        v: ``[T, H, Dv]``, any strides; not read where ``host.v`` is a view of ``host.k``.
        host: ``[P, H, S, D]`` pages, any strides. Written to.
        host_slots: ``[T] int64``, page times S, plus the offset in it.
        device: ``[N, Hr, S, D]`` pages, any strides. Written to. Hr is H, or 1: then row r of R
            gets head ``r % (R // T) * H // (R // T)``.
        tail_slots: ``[R] int64``, as ``host_slots``; no slot twice.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_append, k, v, *host, host_slots, *device, tail_slots)
    ops = implementation(impl, host.k.device, device.k.device)
    shared = _shares_memory(host) and _shares_memory(device)
    new = (k,) if shared else (k, v)
    ops.append_tokens(new, _pools(host, shared), host_slots, _pools(device, shared), tail_slots)


def gather_tokens(src: PagedKV, slots: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Read tokens from pages.

    Args:
        src: ``[P, H, S, D]`` or ``[L, P, H, S, D]`` pages, any strides.
        slots: ``[T] int64``, 0 or more.
        impl: "auto", or an implementation's name.

    Returns:
        K ``[T, H, Dk]`` and V ``[T, H, Dv]``, or ``[L, T, H, D]``, on the pages' device or that of
        ``slots``; V is a view of K where ``src.v`` is a view of ``src.k``.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_tokens, *src, slots)
    ops = implementation(impl, src.k.device, slots.device)
    shared = _shares_memory(src)
    tokens = ops.gather_tokens(_pools(src, shared), slots)
    if shared:
        return tokens[0], tokens[0][..., : src.v.shape[-1]]
    return tokens[0], tokens[1]


def _check_gather(
    src_k: Tensor,
    src_v: Tensor,
    src_pages: Tensor,
    dst_k: Tensor,
    dst_v: Tensor,
    dst_pages: Tensor,
) -> None:
    places = (_CPU, src_k.device, dst_k.device)
    check_tensor("src_pages", src_pages, _I32, (None, None))
    check_tensor("dst_pages", dst_pages, _I32, src_pages.shape)
    check_device("src_pages", src_pages, *places)
    check_device("dst_pages", dst_pages, *places)
    check_device("src.v", src_v, src_k.device)
    check_device("dst.v", dst_v, dst_k.device)
    for name, to, of in (("dst.k", dst_k, src_k), ("dst.v", dst_v, src_v)):
        if to.dtype != of.dtype or not _can_hold(to.shape, of.shape):
            raise KernelError(
                f"{name}: got pages {list(to.shape)} of {to.dtype}, expected those of the "
                f"source, {list(of.shape)} of {of.dtype}, in any number, or one head of them"
            )
    if src_k.shape[-3] != src_v.shape[-3] or dst_k.shape[-3] != dst_v.shape[-3]:
        raise KernelError(
            f"v: got {src_v.shape[-3]} heads to {dst_v.shape[-3]}, expected those of k, "
            f"{src_k.shape[-3]} to {dst_k.shape[-3]}"
        )


def _check_scatter(k: Tensor, v: Tensor, dst_k: Tensor, dst_v: Tensor, slots: Tensor) -> None:
    tokens = k.shape[-3]
    check_tensor("slots", slots, _I64, (tokens,))
    check_device("slots", slots, _CPU, k.device, dst_k.device)
    for name, new, pages in (("k", k, dst_k), ("v", v, dst_v)):
        *layers, _, heads, _, width = pages.shape
        check_tensor(name, new, pages.dtype, (*layers, tokens, heads, width), k.device)
    check_device("dst.v", dst_v, dst_k.device)


def _check_append(
    k: Tensor,
    v: Tensor,
    host_k: Tensor,
    host_v: Tensor,
    host_slots: Tensor,
    device_k: Tensor,
    device_v: Tensor,
    tail_slots: Tensor,
) -> None:
    _check_scatter(k, v, host_k, host_v, host_slots)
    check_tensor("tail_slots", tail_slots, _I64, (None,), device_k.device)
    rows, (tokens, heads, _) = tail_slots.shape[0], k.shape
    each = rows // max(tokens, 1)
    if (rows % tokens if tokens else rows) != 0 or (each > 1 and each % heads):
        raise KernelError(
            f"tail_slots: got {rows} for {tokens} tokens of {heads} heads, expected one each, or a "
            "multiple of the heads"
        )
    for name, pages, of in (("device.k", device_k, host_k), ("device.v", device_v, host_v)):
        shape = (None, heads if each <= 1 else 1, of.shape[2], of.shape[3])
        check_tensor(name, pages, of.dtype, shape, device_k.device)


def _check_tokens(src_k: Tensor, src_v: Tensor, slots: Tensor) -> None:
    check_tensor("slots", slots, _I64, (None,))
    check_device("src.v", src_v, src_k.device)


def _shares_memory(kv: PagedKV) -> bool:
    """Whether V is a view of K's first columns."""
    return kv.v.data_ptr() == kv.k.data_ptr() and kv.v.shape[-1] <= kv.k.shape[-1]


def _pools(kv: PagedKV, shared: bool) -> tuple[Tensor, ...]:
    return (kv.k,) if shared else (kv.k, kv.v)


def _can_hold(to: torch.Size, of: torch.Size) -> bool:
    """Whether pages of shape ``to`` can hold pages of shape ``of``, or one head of them."""
    if len(to) != len(of) or len(to) not in (4, 5) or to[:-4] != of[:-4]:
        return False
    return to[-2:] == of[-2:] and to[-3] in (1, of[-3])
