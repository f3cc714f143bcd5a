"""Moves keys, values and scales as they are stored, and reads and writes K and V of tokens."""

from __future__ import annotations

from torch import Tensor

from hisparse import kernels
from hisparse.algorithms import DecodeStep
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.kernels import (
    TailPages,
    gather_pages,
    gather_tokens,
    scatter_tokens,
    verify_indices,
)
from hisparse.types import PagedKV, StoredKV


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


class KVReadWrite:
    """Encodes, writes, reads and decodes tokens of both pools.

    Args:
        host: the whole KV cache.
        device: the device pages.
        checked: verify that host slots exist; waits for the device.
    """

    def __init__(self, host: HostKVPool, device: DevicePool, *, checked: bool = False) -> None:
        self._host = host
        self._device = device
        self._checked = checked

    def write(self, layer_id: int, host_slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new tokens through to host memory: ``host_slots [T]``, ``k, v [T, Hkv, D]``."""
        self._verify(host_slots)
        write_tokens(self._host.format.encode(k, v), self._host.stored(layer_id), host_slots)

    def append(
        self, layer_id: int, tail_slots: Tensor, host_slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write new tokens to tail pages and host slots: ``SparseKVCacheManager.append``."""
        self._verify(host_slots)
        new = self._host.format.encode(k, v)
        append_tokens(
            new, self._host.stored(layer_id), host_slots, self._device.stored(layer_id), tail_slots
        )

    def write_tail(self, layer_id: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Fill the first tokens of a request's tail pages: ``k, v [t, Hkv, D]``, t < S."""
        heads = self._device.heads
        rows = slice(slot * heads, (slot + 1) * heads)
        pages = self._device.tail_pages[layer_id, rows].long()
        tails = self._device.stored(layer_id).tensors
        for pages_kv, new in zip(tails, self._host.format.encode(k, v).tensors, strict=True):
            by_head = new.transpose(0, 1)
            if heads == 1:
                pages_kv[pages, :, : new.shape[0]] = by_head[None]
            else:
                by_head = by_head.repeat_interleave(heads // new.shape[1], dim=0)
                pages_kv[pages, :, : new.shape[0]] = by_head[:, None]

    def read_tails(self, layer_id: int, step: DecodeStep) -> PagedKV:
        """K and V of the tail pages, each ``[B, Hkv, S, D]``, in the model's dtype."""
        kv, heads = self._host.kv, self._device.heads
        pages = step.row_tails[layer_id].long()
        tails = StoredKV(*(each[pages] for each in self._device.stored(layer_id).tensors))
        k, v = self._host.format.decode(tails)
        if heads > 1:
            copies = heads // kv.num_kv_heads
            k, v = (x.unflatten(0, (-1, kv.num_kv_heads, copies))[:, :, 0, 0] for x in (k, v))
        return PagedKV(k, v)

    def tail_pages(self, layer_id: int, step: DecodeStep) -> TailPages:
        """The tail pages, in place or decoded."""
        stored, pages = self._device.stored(layer_id), step.row_tails[layer_id]
        readable = self._device.format.readable_pages(stored, pages)
        return TailPages(*readable, step.row_tail_lens)

    def host_pages(self, layer_id: int) -> PagedKV:
        """K and V of the host pool, each ``[host pages, Hkv, S, D]``.

        Raises:
            HiSparseError: they are stored otherwise than in the model's dtype.
        """
        return self._host.format.in_place(self._host.stored(layer_id))

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> PagedKV:
        """K and V at ``host_slots [T]``, each ``[T, Hkv, D]`` on the device."""
        return self._host.format.decode(self.read_stored(layer_id, host_slots))

    def read_stored(self, layer_id: int, host_slots: Tensor) -> StoredKV:
        """Stored values at ``host_slots [T]``, ``[T, Hkv, D]`` on the device."""
        stored = read_tokens(self._host.stored(layer_id), host_slots)
        return StoredKV(*(x.to(self._device.device) for x in stored.tensors))

    def _verify(self, host_slots: Tensor) -> None:
        if self._checked:
            num_pages, _, size, _ = self._host.stored(0).k.shape
            verify_indices("slots", host_slots, 0, num_pages * size)
