"""Device memory that host pages stream through, tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.cache.codec import decode, move_pages
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.streams import Pending, SideStreams
from hisparse.types import PagedKV, StoredKV

__all__ = ["Staging", "Tile"]


class Tile(NamedTuple):
    """Pages that are read together.

    Attributes:
        layer_id: layer number.
        owner: whose pages; numbers the requests of a forward.
        first: page index in the sequence of the first page.
        end: position after the last token that is looked at; behind it the last page may be written
            while the tile arrives.
        host_pages: ``[P] int32``; on the host if it knows them, which lets the copy engine move
            them.
    """

    layer_id: int
    owner: int
    first: int
    end: int
    host_pages: Tensor

    def is_same(self, other: Tile) -> bool:
        """Whether both are the same tokens, in one forward."""
        return self[:4] == other[:4]


class _Coming(NamedTuple):
    tile: Tile
    buffer: int
    arrived: Pending[None]


class Staging:
    """Buffers of one tile each: with two of them the next tile arrives while one is attended.

    Args:
        host: where pages are read.
        num_pages: pages of a tile at most.
        num_buffers: 1 or 2.
        device: where the buffers lie.
        streams: beside which stream tiles arrive.
    """

    def __init__(
        self,
        host: HostKVPool,
        num_pages: int,
        num_buffers: int,
        device: torch.device,
        streams: SideStreams,
    ) -> None:
        self._host = host
        self._streams = streams
        self._num_pages = num_pages
        kv = host.kv
        self._buffers = [self._allocate(kv.stored_dtype, device) for _ in range(num_buffers)]
        # What is stored in another dtype than the model's is read into a tile of its own.
        self._decoded = self._allocate(kv.dtype, device).kv if kv.fp8 else None
        staged = torch.arange(num_pages, dtype=torch.int32)
        # By where a list of pages lies: on the host, or on the device.
        self._staged = {"cpu": staged, device.type: staged.to(device)}
        self._coming: _Coming | None = None

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> StoredKV:
        kv = self._host.kv
        shape = (self._num_pages, kv.page_size, kv.num_kv_heads)

        def tile(width: int) -> Tensor:
            return torch.zeros(*shape, width, dtype=dtype, device=device).transpose(1, 2)

        k = tile(kv.head_dim)
        v = k[..., : kv.v_head_dim] if kv.latent else tile(kv.v_head_dim)
        if dtype != torch.float8_e4m3fn:
            return StoredKV(k, v)
        return StoredKV(k, v, torch.zeros(*k.shape[:-1], 2, dtype=torch.uint8, device=device))

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        kv, decoded = self._host.kv, self._decoded or ()
        tokens = len(self._buffers) * self._num_pages * kv.page_size
        return tokens * kv.token_bytes_per_layer + sum(x.nbytes for x in decoded)

    def read(self, tile: Tile, ahead: Tile | None = None) -> PagedKV:
        """Bring a tile in, and start to bring in the next one.

        Args:
            tile: at most ``num_pages`` pages.
            ahead: what is read next but for tiles that are read without it; None: not known. Its
                pages have been written before this call.

        Returns:
            ``[P, Hkv, S, D]`` in the model's dtype, views of a buffer, valid until the next call.
        """
        coming, buffer = self._coming, 0
        if coming is not None and coming.tile.is_same(tile):
            self._coming, buffer = None, coming.buffer
            arrived = coming.arrived
        else:
            if coming is not None and ahead is None:
                buffer = 1 - coming.buffer
            arrived = self._start(tile, buffer)
        if ahead is not None and len(self._buffers) > 1:
            self._coming = _Coming(ahead, 1 - buffer, self._start(ahead, 1 - buffer))
        arrived.join()
        count, decoded = tile.host_pages.numel(), self._decoded
        stored = StoredKV(*(x[:count] for x in self._buffers[buffer].tensors))
        if decoded is None:
            return stored.kv
        return decode(self._host.kv, stored, PagedKV(decoded.k[:count], decoded.v[:count]))

    def _start(self, tile: Tile, buffer: int) -> Pending[None]:
        return self._streams.start("read", lambda: self._fill(tile, self._buffers[buffer]))

    def _fill(self, tile: Tile, buffer: StoredKV) -> None:
        pages = tile.host_pages
        staged = self._staged[pages.device.type][None, : pages.numel()]
        move_pages(self._host.stored(tile.layer_id), pages[None], buffer, staged)

    def forget(self) -> None:
        """What was to be read next is not: the forward is over."""
        self._coming = None
