"""Moves keys, values and scales as they are stored, and reads and writes K and V of tokens."""

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache.device_pool import DevicePool, RowSnapshot
from hisparse.cache.host_pool import HostKVPool
from hisparse.kernels import (
    HostKeys,
    NewTokens,
    TailPages,
    TailPools,
    append_tokens,
    gather_pages,
    gather_tokens,
    promote_tail,
    scatter_tokens,
    upload,
    verify_indices,
)
from hisparse.kernels.operation import new_tensors
from hisparse.types import PagedKV, StoredKV


def write_tokens(new: StoredKV, dst: StoredKV, slots: Tensor) -> None:
    """Write tokens ``[T, H, D]`` to ``slots [T] int64`` of pages ``[P, H, S, D]``."""
    for tokens, pages in zip(new.pools, dst.pools, strict=True):
        scatter_tokens(tokens.k, tokens.v, pages, slots)


def read_tokens(src: StoredKV, slots: Tensor) -> StoredKV:
    """Tokens ``[T, H, D]`` at ``slots [T] int64`` of pages ``[P, H, S, D]``, on their device."""
    kv, *scales = [gather_tokens(pages, slots) for pages in src.pools]
    return StoredKV(*kv, *(each for each, _ in scales))


def move_pages(
    src: StoredKV, src_pages: Tensor, dst: StoredKV, dst_pages: Tensor, *, heads: int = 1
) -> None:
    """Copy page ``src_pages[r, i]`` to page ``dst_pages[r, i]`` wherever both are >= 0.

    Args:
        src: pages ``[Psrc, Hs, S, D]`` as stored, and their scales ``[Psrc, Hs, S, 2]``, if any.
        src_pages, dst_pages: ``[R, K] int32``, on the CPU or on the device of a pool.
        dst: pages ``[Pdst, Hd, S, D]`` of the same dtypes. Hd is Hs, or 1: then row r gets head
            ``r % heads * Hs // heads``.
        heads: rows of a request.
    """
    gather_pages(src, src_pages, dst, dst_pages, heads=heads)
    for scales in zip(src.pools[1:], dst.pools[1:], strict=True):
        # A page's scales are contiguous: as one "token" they move in few, wide loads.
        rows = (each.k.view(*each.k.shape[:2], 1, -1) for each in scales)
        source, target = (StoredKV(x, x) for x in rows)
        gather_pages(source, src_pages, target, dst_pages, heads=heads)


class KVReadWrite:
    """Encodes, writes, reads and decodes tokens of both pools.

    Args:
        checked: verify that host slots exist; waits for the device.
    """

    def __init__(self, host: HostKVPool, device: DevicePool, *, checked: bool = False) -> None:
        self._host = host
        self._device = device
        self._checked = checked
        self._decode_pages = device.format.page_decoder()

    def write(self, layer_id: int, host_slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new ``k, v [T, Hkv, D]``, in the model's dtype, to ``host_slots [T] int64``."""
        self._verify(host_slots)
        write_tokens(self._host.format.encode(k, v), self._host.stored(layer_id), host_slots)

    def append(
        self, layer_id: int, tail_slots: Tensor, host_slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write each request's new token to its tail pages and to its host slot.

        Args:
            tail_slots: ``[R] int64``, device page of the row's tail times S, plus the offset in it.
            host_slots: ``[B] int64``, host page times S, plus the offset in it.
            k, v: ``[B, Hkv, D]`` in the model's dtype.
        """
        self._verify(host_slots)
        host, device = self._host.stored(layer_id).pools, self._device.stored(layer_id).pools
        new = self._host.format.encode(k, v).pools
        for tokens, to_host, to_device in zip(new, host, device, strict=True):
            append_tokens(tokens.k, tokens.v, to_host, host_slots, to_device, tail_slots)

    def append_new(self, layer_id: int, step: DecodeStep) -> None:
        """Append the new tokens of a step, unless a kernel has got them or they are appended."""
        if (new := step.cache.new_tokens) is not None:
            step.cache.new_tokens = None
            self.append(layer_id, step.tail_slots(layer_id), step.host_slots, *new)

    def write_tail(self, layer_id: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Fill the first tokens of a request's tail pages: ``k, v [t, Hkv, D]``, t < S."""
        heads = self._device.heads
        rows = slice(slot * heads, (slot + 1) * heads)
        pages = self._device.tail_pages[layer_id, rows].long()
        tails = self._device.stored(layer_id).tensors
        for pages_kv, new in zip(tails, self._host.format.encode(k, v).tensors, strict=True):
            copies = max(1, heads // new.shape[1])
            by_head = new.transpose(0, 1)[:, None].expand(-1, copies, -1, -1)
            pages_kv[pages, :, : new.shape[0]] = by_head.reshape(heads, -1, *new.shape[::2])

    def find_tails(self, layer_id: int, step: DecodeStep) -> Tensor:
        """``[R] int32``, device page of each row's tail as of now."""
        return self._device.tail_pages[layer_id, step.rows.rows]

    def read_tails(self, layer_id: int, step: DecodeStep) -> PagedKV:
        """K and V of the tail pages, each ``[B, Hkv, S, D]``, in the model's dtype."""
        self.append_new(layer_id, step)
        heads, kv_heads = self._device.heads, self._host.kv.num_kv_heads
        pages, stored = step.tails(layer_id), self._device.stored(layer_id).tensors
        shapes = [((len(pages), *x.shape[1:]), x.dtype) for x in stored]
        tails = new_tensors("tails", shapes, pages.device)
        for pages_kv, to in zip(stored, tails, strict=True):
            torch.index_select(pages_kv, 0, pages, out=to)
        k, v = self._host.format.decode(StoredKV(*tails))
        if heads > 1:
            k, v = (x.unflatten(0, (-1, kv_heads, heads // kv_heads))[:, :, 0, 0] for x in (k, v))
        return PagedKV(k, v)

    def promote_tails(
        self, layer_id: int, step: DecodeStep, filled: Tensor, *, with_values: bool
    ) -> tuple[Tensor, ...]:
        """Move full tail pages into the LRU, as the hottest pages.

        Args:
            step: the requests that decode.
            filled: ``[R] bool``, rows with a full tail page.
            with_values: whether to return values too.

        Returns:
            K, or K and V, of the full tail pages, each ``[B, Hkv, S, D]``, model's dtype; the
            entries of other requests are undefined.
        """
        kv_format, tails = self._host.format, None
        k, v = (*kv_format.copied_parts(self._device.stored(layer_id)), None, None)[:2]
        if k is None:  # The kernel copies pages as they are; these have to be decoded.
            tails = self.read_tails(layer_id, step)
        copies = promote_tail(
            step.rows.rows,
            step.num_pages,
            filled,
            step.rows.capacity,
            self._device.state(layer_id),
            self._device.tail_pages[layer_id],
            pools=TailPools(k, v if with_values else None, self._host.kv.num_kv_heads),
        )
        if tails is not None:
            return tails if with_values else tails[:1]
        return kv_format.join(copies).kv if with_values else copies

    def tail_pages(self, layer_id: int, step: DecodeStep, *, with_new: bool) -> TailPages:
        """The tail pages, in place or decoded; in place, maybe with new tokens to write to them."""
        stored, host = self._device.stored(layer_id), self._host.stored(layer_id)
        pages, new = (stored, step.tails(layer_id)), None
        if not with_new or self._decode_pages is not None or stored.scales is not None:
            self.append_new(layer_id, step)
        if self._decode_pages is not None:
            pages = self._decode_pages(*pages)
        elif (tokens := step.cache.new_tokens) is not None:
            step.cache.new_tokens = None
            self._verify(step.host_slots)
            k, v = self._host.format.encode(*tokens).kv
            new = NewTokens(k, v, host, step.host_slots, step.tail_slots(layer_id))
        return TailPages(*pages, step.rows.tail_lens, new)

    def host_keys(self, layer_id: int) -> HostKeys:
        """Keys of the host pool, as they are stored."""
        return self._host.format.host_keys(self._host.stored(layer_id))

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> PagedKV:
        """K and V at ``host_slots [T] int64``, each ``[T, Hkv, D]`` on the device."""
        slots = upload(host_slots, self._device.device)
        return self._host.format.decode(read_tokens(self._host.stored(layer_id), slots))

    def read_changed(
        self, layer_id: int, before: RowSnapshot, host_page_table: Tensor, tail_index: Tensor
    ) -> None:
        """Read pages from host memory whose place in the rows' tables has changed.

        Args:
            before: the tables before the change, which the bytes in device memory still match.
            host_page_table: ``[B, P] int32``, host pages of the rows' requests.
            tail_index: ``[B] int32``, index of the tail page; -1: it is empty, or did not move.
        """
        heads = self._device.heads
        now = self._device.save_rows(layer_id, before.rows, before.slot_pages.shape[1])
        tail_index = tail_index.repeat_interleave(heads)[:, None]
        lost = (now.slot_pages != before.slot_pages) | (now.device_pages != before.device_pages)
        wanted = torch.cat([now.slot_pages.where(lost, -1), tail_index], 1)
        table = host_page_table.repeat_interleave(heads, 0)
        source = table.gather(1, wanted.clamp(min=0).long()).where(wanted >= 0, -1)
        target = torch.cat([now.device_pages, now.tail_pages[:, None]], 1).where(wanted >= 0, -1)
        host, device = self._host.stored(layer_id), self._device.stored(layer_id)
        move_pages(host, source, device, target, heads=heads)

    def _verify(self, host_slots: Tensor) -> None:
        if self._checked:
            num_pages, _, size, _ = self._host.stored(0).k.shape
            verify_indices("slots", host_slots, 0, num_pages * size)
