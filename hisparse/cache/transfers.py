"""Pages and tokens between two pools of one layer, with or without scales."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels import gather_pages, gather_tokens, scatter_tokens
from hisparse.types import PagedKV, StoredKV

__all__ = ["move_pages", "read_tokens", "write_tokens"]


def write_tokens(new: StoredKV, dst: StoredKV, slots: Tensor) -> None:
    """Write tokens ``[T, H, D]`` to ``slots [T] int64`` of pages ``[P, H, S, D]``."""
    scatter_tokens(new.k, new.v, dst.kv, slots)
    if new.scales is not None and dst.scales is not None:
        scatter_tokens(new.scales, new.scales, PagedKV(dst.scales, dst.scales), slots)


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
        # A page's scales lie side by side: one "token" of them moves in few, wide loads.
        source, target = (x.view(*x.shape[:2], 1, -1) for x in (src.scales, dst.scales))
        gather_pages(
            PagedKV(source, source), src_pages, PagedKV(target, target), dst_pages, heads=heads
        )
