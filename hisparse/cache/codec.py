"""Encodes, decodes and moves keys and values, stored in the model's dtype or as scaled fp8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse import kernels
from hisparse.kernels import (
    decode_latents,
    dequantize,
    encode_latents,
    gather_pages,
    gather_tokens,
    quantize,
    scatter_tokens,
)
from hisparse.types import KVSpec, LatentRow, PagedKV, StoredKV

__all__ = [
    "append_tokens",
    "as_read",
    "decode",
    "decode_pages",
    "encode",
    "move_pages",
    "read_tokens",
    "split_layers",
    "write_tokens",
]


def split_layers(k: Tensor, v: Tensor, scales: Tensor | None) -> list[StoredKV]:
    """Split the pools of all layers ``[L, ...]`` into one ``StoredKV`` per layer."""
    if scales is None:
        return [StoredKV(*each) for each in zip(k, v, strict=True)]
    return [StoredKV(*each) for each in zip(k, v, scales, strict=True)]


def encode(kv: KVSpec, k: Tensor, v: Tensor) -> StoredKV:
    """Convert keys and values ``[..., D]`` from the model's dtype to the stored format."""
    row = kv.latent_row
    if row is not None:
        rows = encode_latents(k, row)
        return StoredKV(rows, rows[..., : row.rank])
    return quantize(k, v, torch.float8_e4m3fn) if kv.fp8 else StoredKV(k, v)


def decode(kv: KVSpec, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
    """Convert stored keys and values back to the model's dtype.

    Args:
        kv: shapes of the model.
        stored: ``[..., D]``.
        out: ``[..., D]``, receives the result if a conversion is needed; None: allocate it.
    """
    if not kv.fp8:
        return stored.kv
    row = kv.latent_row
    if row is not None:
        tokens = stored.k.flatten(0, -2)[:, None]
        table = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        return _decode_latents(kv, row, tokens, table, stored.k.shape[:-1], out)
    if out is None:
        k, v = (torch.empty(x.shape, dtype=kv.dtype, device=x.device) for x in stored.kv)
        out = PagedKV(k, v)
    dequantize(stored, out)
    return out


def decode_pages(
    kv: KVSpec, stored: StoredKV, pages: Tensor, out: PagedKV | None = None
) -> PagedKV:
    """Some pages of latents in eight bits, in the model's dtype.

    Args:
        kv: shapes of the model.
        stored: ``[N, 1, S, bytes]``.
        pages: ``[n] int32``; for -1 any numbers are returned.
        out: ``[n, 1, S, D]``, receives the result; None: allocate it.
    """
    row = kv.latent_row
    assert row is not None, "only latents in eight bits are decoded by page"
    shape = (*pages.shape, *stored.k.shape[1:-1])
    return _decode_latents(kv, row, stored.k[:, 0], pages, shape, out)


def _decode_latents(
    kv: KVSpec,
    row: LatentRow,
    pages: Tensor,
    table: Tensor,
    shape: Sequence[int],
    out: PagedKV | None,
) -> PagedKV:
    """``pages [N, S, bytes]`` at ``table [n]`` as ``[*shape, D]``."""
    if out is None:
        k = torch.empty(*shape, row.width, dtype=kv.dtype, device=pages.device)
        out = PagedKV(k, k[..., : row.rank])
    decode_latents(pages, table, row, out.k.view(len(table), -1, row.width))
    return out


def as_read(kv: KVSpec, k: Tensor, v: Tensor) -> PagedKV:
    """Round keys and values ``[..., D]`` to the values that a later read returns."""
    return decode(kv, encode(kv, k, v))


def write_tokens(new: StoredKV, dst: StoredKV, slots: Tensor) -> None:
    """Write tokens ``[T, H, D]`` to ``slots [T] int64`` of pages ``[P, H, S, D]``."""
    scatter_tokens(new.k, new.v, dst.kv, slots)
    if new.scales is not None and dst.scales is not None:
        scatter_tokens(new.scales, new.scales, PagedKV(dst.scales, dst.scales), slots)


def append_tokens(
    new: StoredKV, host: StoredKV, host_slots: Tensor, device: StoredKV, tail_slots: Tensor
) -> None:
    """Write tokens ``[B, H, D]`` to both pools; see :func:`hisparse.kernels.append_tokens`."""
    kernels.append_tokens(new.k, new.v, host.kv, host_slots, device.kv, tail_slots)
    if new.scales is not None and host.scales is not None and device.scales is not None:
        to_host = PagedKV(host.scales, host.scales)
        to_device = PagedKV(device.scales, device.scales)
        kernels.append_tokens(new.scales, new.scales, to_host, host_slots, to_device, tail_slots)


def read_tokens(src: StoredKV, slots: Tensor) -> StoredKV:
    """Tokens ``[T, H, D]`` at ``slots [T] int64`` of pages ``[P, H, S, D]``, on their device."""
    k, v = gather_tokens(src.kv, slots)
    if src.scales is None:
        return StoredKV(k, v)
    scales, _ = gather_tokens(PagedKV(src.scales, src.scales), slots)
    return StoredKV(k, v, scales)


def move_pages(
    src: StoredKV, src_pages: Tensor, dst: StoredKV, dst_pages: Tensor, *, heads: int = 1
) -> None:
    """Copy pages; see :func:`hisparse.kernels.gather_pages`."""
    gather_pages(src.kv, src_pages, dst.kv, dst_pages, heads=heads)
    if src.scales is not None and dst.scales is not None:
        # A page's scales are contiguous: as one "token" they move in few, wide loads.
        source, target = (x.view(*x.shape[:2], 1, -1) for x in (src.scales, dst.scales))
        gather_pages(
            PagedKV(source, source), src_pages, PagedKV(target, target), dst_pages, heads=heads
        )
