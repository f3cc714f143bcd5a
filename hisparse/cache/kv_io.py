"""Reads and writes K and V of single tokens, in the host pool and in tail pages."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache.codec import (
    append_tokens,
    decode,
    decode_pages,
    encode,
    read_tokens,
    write_tokens,
)
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.errors import HiSparseError
from hisparse.kernels import TailPages, verify_indices
from hisparse.types import PagedKV, StoredKV

__all__ = ["KVReadWrite"]


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
        write_tokens(encode(self._host.kv, k, v), self._host.stored(layer_id), host_slots)

    def append(
        self, layer_id: int, tail_slots: Tensor, host_slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write new tokens to tail pages and host slots: ``SparseKVCacheManager.append``."""
        self._verify(host_slots)
        new = encode(self._host.kv, k, v)
        append_tokens(
            new, self._host.stored(layer_id), host_slots, self._device.stored(layer_id), tail_slots
        )

    def write_tail(self, layer_id: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Fill the first tokens of a request's tail pages: ``k, v [t, Hkv, D]``, t < S."""
        heads = self._device.heads
        rows = slice(slot * heads, (slot + 1) * heads)
        pages = self._device.tail_pages[layer_id, rows].long()
        tails = self._device.stored(layer_id).tensors
        for pages_kv, new in zip(tails, encode(self._host.kv, k, v).tensors, strict=True):
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
        k, v = decode(kv, tails)
        if heads > 1:
            copies = heads // kv.num_kv_heads
            k, v = (x.unflatten(0, (-1, kv.num_kv_heads, copies))[:, :, 0, 0] for x in (k, v))
        return PagedKV(k, v)

    def tail_pages(self, layer_id: int, step: DecodeStep) -> TailPages:
        """The tail pages in place; latents in eight bits are decoded."""
        kv, pages = self._device.stored(layer_id), step.row_tails[layer_id]
        if self._device.kv.latent_row is not None:
            kv = StoredKV(*decode_pages(self._device.kv, kv, pages))
            pages = torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device)
        return TailPages(kv, pages, step.row_tail_lens)

    def host_pages(self, layer_id: int) -> PagedKV:
        """K and V of the host pool, each ``[host pages, Hkv, S, D]``.

        Raises:
            HiSparseError: the pool stores fp8, which algorithms cannot read.
        """
        if self._host.kv.fp8:
            raise HiSparseError(
                "an algorithm reads keys in host memory: got fp8 keys, expected kv_cache_dtype "
                "'auto'; the algorithm has to declare reads_host_keys = True"
            )
        return self._host.layer(layer_id)

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> PagedKV:
        """K and V at ``host_slots [T]``, each ``[T, Hkv, D]`` on the device."""
        return decode(self._host.kv, self.read_stored(layer_id, host_slots))

    def read_stored(self, layer_id: int, host_slots: Tensor) -> StoredKV:
        """Stored values at ``host_slots [T]``, ``[T, Hkv, D]`` on the device."""
        stored = read_tokens(self._host.stored(layer_id), host_slots)
        return StoredKV(*(x.to(self._device.device) for x in stored.tensors))

    def _verify(self, host_slots: Tensor) -> None:
        if self._checked:
            num_pages, _, size, _ = self._host.stored(0).k.shape
            verify_indices("slots", host_slots, 0, num_pages * size)
