"""Moving pages and tokens between host and device.

Pools are one layer's ``[P, H, S, D]`` or all layers' ``[L, P, H, S, D]``. With all layers' pools, a
call moves the same pages or tokens in every layer. Where V is a view of K, as with MLA, whose
values are the first columns of its keys, only K is moved. Scales stay: they move as pools of their
own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import Arg
from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.operation import Operation
from hisparse.types import Pages, StoredKV

__all__ = [
    "NewTokens",
    "append_tokens",
    "gather_pages",
    "gather_tokens",
    "scatter_tokens",
    "upload",
]

_I32, _I64 = torch.int32, torch.int64
_LISTS = ("cpu", "src.k", "dst.k")
#: K and V that an implementation moves; None for V that is a view of K.
MovedKV = tuple[Tensor, Tensor | None]

#: Page-locked memory is registered with CUDA in pieces that end at multiples of this address. CUDA
#: may refuse a copy from two registrations, so the copy engine never gets one. Drivers refuse a
#: registration of 512 GiB or more.
PIECE_BYTES = 64 * 2**30

#: Bytes that one call of the copy engine should move, on average, to be worth its fixed cost.
#: Still an estimate: some microseconds a call at 55 GB/s against 37 GB/s by kernel. The kernel has
#: reached 46.8 GB/s since; ``make gpu-check`` times the copy engine.
MIN_COPY_BYTES = 256 * 1024


class NewTokens(NamedTuple):
    """A token of each request that :func:`append_tokens` would write.

    Attributes:
        k, v: ``[B, Hkv, D]``, in the dtype of the pools.
        host: ``[P, Hkv, S, D]`` pages without scales.
        host_slots: ``[B] int64``, page of ``host`` times S, plus the offset in it.
        tail_slots: ``[R] int64``, the same of each row's tail page.
    """

    k: Tensor
    v: Tensor
    host: StoredKV
    host_slots: Tensor
    tail_slots: Tensor


def _heads_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    got, stored = sizes["Hd"], sizes["Hs"]
    if got != stored and not (got == 1 and stored > 1):
        raise KernelError(
            f"dst.k: got pages of {got} heads, expected those of the source, {stored}, or 1 head"
        )


def _tail_slots_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    rows, tokens, heads = sizes["R"], sizes["T"], sizes["H"]
    each = rows // max(tokens, 1)
    if (rows % tokens if tokens else rows) != 0 or (each > 1 and each % heads):
        raise KernelError(
            f"tail_slots: got {rows} for {tokens} tokens of {heads} heads, expected one each, or a "
            "multiple of the heads"
        )
    want = heads if each <= 1 else 1
    if sizes["Hr"] != want:
        shape = tensors["device.k"].shape
        expected = f"[any, {want}, {shape[2]}, {shape[3]}]"
        raise KernelError(f"device.k: got shape {list(shape)}, expected {expected}")


def _gather_on_cuda(
    call: Callable[..., Any],
    src: MovedKV,
    src_pages: Tensor,
    dst: MovedKV,
    dst_pages: Tensor,
    heads: int,
) -> None:
    """Copies pages by kernel, or by the copy engine where the lists are on the CPU.

    The kernel reads pinned host memory in place and skips a page that a pool does not have. The
    copy engine gets pages that are long enough runs.
    """
    device = cuda_device(src[0], dst[0])
    listed = device.type == "cuda" and "cpu" in (src_pages.device.type, dst_pages.device.type)
    if listed and copy_pages(src, src_pages.cpu(), dst, dst_pages.cpu(), heads):
        return
    call(*src, upload(src_pages, device), *dst, upload(dst_pages, device), heads)


def copy_pages(
    src: MovedKV,
    src_pages: Tensor,
    dst: MovedKV,
    dst_pages: Tensor,
    heads: int,
) -> bool:
    """``gather_pages`` by the copy engine: pages that follow each other go in one call.

    Args:
        src, dst, heads: as ``gather_pages``; without values only keys are moved.
        src_pages: ``[R, K] int32`` on the CPU.
        dst_pages: ``[R, K] int32`` on the CPU.

    Returns:
        Whether the pages are being copied: not if calls would move too few bytes on average. No
        call reads or writes on both sides of a multiple of ``PIECE_BYTES``.
    """
    tensors = GATHER_PAGES.native([*src, src_pages, *dst, dst_pages])
    return bool(call_cuda("copy_pages", *tensors, heads, MIN_COPY_BYTES, PIECE_BYTES))


GATHER_PAGES = Operation(
    __name__,
    "gather_pages",
    Arg("src.k", "?L Ps Hs S Dk", on=(), layout="any"),
    Arg("src.v", "?L Ps Hs S Dv", on=("src.k",), layout="any"),
    Arg("src_pages", "R K", _I32, on=_LISTS),
    Arg("dst.k", "?L Pd Hd S Dk", like="src.k", on=(), written=True, layout="any"),
    Arg("dst.v", "?L Pd Hd S Dv", like="src.v", on=("dst.k",), written=True, layout="any"),
    Arg("dst_pages", "R K", _I32, on=_LISTS),
    cpu=lambda call, src, src_pages, dst, dst_pages, heads: call(
        *src, src_pages, *dst, dst_pages, heads
    ),
    cuda=_gather_on_cuda,
    also=_heads_fit,
)
SCATTER_TOKENS = Operation(
    __name__,
    "scatter_tokens",
    Arg("dst.k", "?L P H S Dk", on=(), written=True, layout="any"),
    Arg("dst.v", "?L P H S Dv", on=("dst.k",), written=True, layout="any"),
    Arg("k", "?L T H Dk", like="dst.k", on=(), layout="any"),
    Arg("v", "?L T H Dv", like="dst.v", on=("k",), layout="any"),
    Arg("slots", "T", _I64, on=("cpu", "k", "dst.k")),
    cpu=lambda call, dst, tokens, slots: call(*dst, *tokens, slots),
    cuda=lambda call, dst, tokens, slots: call(
        *dst, *tokens, upload(slots, cuda_device(tokens[0], dst[0]))
    ),
)


def _append_on_cpu(
    call: Callable[..., Any],
    host: MovedKV,
    tokens: MovedKV,
    host_slots: Tensor,
    device: MovedKV,
    tail_slots: Tensor,
) -> None:
    """One call for the host's pages, and one for the tail pages."""
    SCATTER_TOKENS.on_cpu(*host, *tokens, host_slots)
    SCATTER_TOKENS.on_cpu(*device, *row_tokens(tokens, tail_slots.shape[0]), tail_slots)


APPEND_TOKENS = Operation(
    __name__,
    "append_tokens",
    Arg("host.k", "P H S Dk", on=(), written=True, layout="any"),
    Arg("host.v", "P H S Dv", on=("host.k",), written=True, layout="any"),
    Arg("k", "T H Dk", like="host.k", on=(), layout="any"),
    Arg("v", "T H Dv", like="host.v", on=("k",), layout="any"),
    Arg("host_slots", "T", _I64, on=("cpu", "k", "host.k")),
    Arg("device.k", "N Hr S Dk", like="host.k", on=(), written=True, layout="any"),
    Arg("device.v", "N Hr S Dv", like="host.v", on=("device.k",), written=True, layout="any"),
    Arg("tail_slots", "R", _I64, on=("device.k",)),
    cpu=_append_on_cpu,
    cuda=lambda call, host, tokens, host_slots, device, tail_slots: call(
        *host, *tokens, upload(host_slots, tokens[0].device), *device, tail_slots
    ),
    also=_tail_slots_fit,
)
GATHER_TOKENS = Operation(
    __name__,
    "gather_tokens",
    Arg("src.k", "?L P H S Dk", on=(), layout="any"),
    Arg("src.v", "?L P H S Dv", on=("src.k",), layout="any"),
    Arg("slots", "T", _I64, on=()),
    cpu=lambda call, src, slots, tokens: call(*src, slots, *tokens),
    cuda=lambda call, src, slots, tokens: call(*src, upload(slots, tokens[0].device), *tokens),
)


def gather_pages(
    src: Pages,
    src_pages: Tensor,
    dst: Pages,
    dst_pages: Tensor,
    *,
    heads: int = 1,
    impl: str = "auto",
) -> None:
    """Copy page ``src_pages[r, i]`` to page ``dst_pages[r, i]`` wherever both are >= 0.

    Args:
        src: ``[Psrc, Hs, S, D]`` or ``[L, Psrc, Hs, S, D]`` pages, any dtype, any strides.
        src_pages: ``[R, K] int32``, on the CPU or on the device of a pool.
        dst: ``[Pdst, Hd, S, D]`` or ``[L, Pdst, Hd, S, D]`` pages, dtype of ``src``, any strides.
            Written to. Hd is Hs, or 1: then row r gets head ``r % heads * Hs // heads``.
        dst_pages: ``[R, K] int32``, on the CPU or on the device of a pool; no page twice.
        heads: rows per request.

    Raises:
        KernelError: ``heads`` is not positive; on CUDA, a pool has odd row widths or a strided
            last dimension, or is unpinned host memory.
    """
    run = GATHER_PAGES(impl, src.k, src.v, src_pages, dst.k, dst.v, dst_pages)
    if heads < 1:
        raise KernelError(f"heads: got {heads}, expected 1 or more")
    keys_only = _lies_within(src) and _lies_within(dst)
    run(_moved(src, keys_only), src_pages, _moved(dst, keys_only), dst_pages, heads)


def scatter_tokens(k: Tensor, v: Tensor, dst: Pages, slots: Tensor, *, impl: str = "auto") -> None:
    """Write token t to page ``slots[t] // S``, offset ``slots[t] % S``, all heads.

    Args:
        k: ``[T, H, Dk]`` or ``[L, T, H, Dk]``, dtype of ``dst``, any strides.
        v: ``[T, H, Dv]`` or ``[L, T, H, Dv]``, same dtype, any strides; not read where
            ``dst.v`` is a view of ``dst.k``.
        dst: ``[P, H, S, D]`` or ``[L, P, H, S, D]`` pages, any dtype and strides. Written to.
        slots: ``[T] int64``, 0 or more; if a slot stands twice, either token may win. On the CPU,
            or on the device of ``k`` or ``dst``.
    """
    run = SCATTER_TOKENS(impl, dst.k, dst.v, k, v, slots)
    keys_only = _lies_within(dst)
    run(_moved(dst, keys_only), _moved((k, v), keys_only), slots)


def append_tokens(
    k: Tensor,
    v: Tensor,
    host: Pages,
    host_slots: Tensor,
    device: Pages,
    tail_slots: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Write each request's new token to its host slot and to the tail pages of its rows.

    Args:
        k: ``[T, H, Dk]``, in the dtype of the pools, any strides.
        v: ``[T, H, Dv]``, same dtype, any strides; not read where ``host.v`` is a view of
            ``host.k``.
        host: ``[P, H, S, D]`` pages, any dtype and strides. Written to.
        host_slots: ``[T] int64``, page times S, plus the offset in it.
        device: ``[N, Hr, S, D]`` pages, dtype of ``host``, any strides. Written to. Hr is H, or 1:
            then row r of R gets head ``r % (R // T) * H // (R // T)``.
        tail_slots: ``[R] int64``, as ``host_slots``; no slot twice.
    """
    pools = (host.k, host.v, k, v, host_slots, device.k, device.v, tail_slots)
    run = APPEND_TOKENS(impl, *pools)
    keys_only = _lies_within(host) and _lies_within(device)
    tokens = _moved((k, v), keys_only)
    run(_moved(host, keys_only), tokens, host_slots, _moved(device, keys_only), tail_slots)


def gather_tokens(src: Pages, slots: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Read tokens from pages.

    Args:
        src: ``[P, H, S, D]`` or ``[L, P, H, S, D]`` pages, any dtype and strides.
        slots: ``[T] int64``, 0 or more.

    Returns:
        K ``[T, H, Dk]`` and V ``[T, H, Dv]``, or ``[L, T, H, D]``, dtype of ``src``, on the pages'
        device or that of ``slots``; V is a view of K where ``src.v`` is a view of ``src.k``.
    """
    run = GATHER_TOKENS(impl, src.k, src.v, slots)
    keys_only = _lies_within(src)
    k, v = new_tokens(src.k, slots), None if keys_only else new_tokens(src.v, slots)
    run(_moved(src, keys_only), slots, (k, v))
    return k, k[..., : src.v.shape[-1]] if v is None else v


def upload(
    values: Tensor | np.ndarray | Sequence[int],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Values of the host as a tensor on a device, without waiting for the device.

    A GPU copies from page-locked memory, which PyTorch keeps until the copy has ended. A copy from
    other memory would wait for all that the stream still has to do.

    Args:
        values: any shape and dtype, on the host; a tensor may lie on the device, and is then
            returned.
        device: where the result is.
        dtype: of the result; None: that of the values.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda" and not tensor.is_cuda:
        # A copy from memory with gaps would pass through other memory.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _lies_within(kv: Pages) -> bool:
    """Whether V is a view of K's first columns."""
    return kv.v.data_ptr() == kv.k.data_ptr() and kv.v.shape[-1] <= kv.k.shape[-1]


def _moved(kv: Pages | tuple[Tensor, Tensor], keys_only: bool) -> MovedKV:
    """K and V without the scales."""
    return kv[0], None if keys_only else kv[1]


def row_tokens(tokens: MovedKV, num_rows: int) -> MovedKV:
    """``[T, Hkv, D]`` -> ``[T * Hkv, 1, D]``, one for each R / T / Hkv rows; if R is T, as is."""
    k, v = tokens
    if num_rows <= k.shape[0]:
        return tokens
    return k.reshape(-1, 1, k.shape[-1]), None if v is None else v.reshape(-1, 1, v.shape[-1])


def new_tokens(pages_kv: Tensor, slots: Tensor) -> Tensor:
    """Uninitialised tokens ``[T, H, D]`` or ``[L, T, H, D]``, in the dtype of the pages.

    Args:
        pages_kv: ``[P, H, S, D]`` or ``[L, P, H, S, D]``, any dtype.
        slots: ``[T] int64``.
    """
    *layers, _, heads, _, width = pages_kv.shape
    shape = (*layers, slots.shape[0], heads, width)
    return torch.empty(shape, dtype=pages_kv.dtype, device=cuda_device(slots, pages_kv))


def cuda_device(*tensors: Tensor) -> torch.device:
    """The CUDA device among those of the tensors, of any shape and dtype; else the first."""
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type == "cuda"), devices[0])
