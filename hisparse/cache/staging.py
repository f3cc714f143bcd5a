"""Device memory that host pages stream through, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import move_pages
from hisparse.cache.streams import Pending, SideStreams
from hisparse.types import PagedKV, StoredKV


class Tile(NamedTuple):
    """Pages of one request that are read together.

    Attributes:
        layer_id: layer number.
        owner: identifies the request within a forward.
        first: index of the first page in the sequence.
        end: position after the last token that is used. A write after that position may run while
            the tile is copied.
        host_pages: ``[P] int32``; a tensor in host memory lets the copy engine move the pages.
    """

    layer_id: int
    owner: int
    first: int
    end: int
    host_pages: Tensor


class Staging:
    """Buffers of one tile each. With two buffers, the next tile is copied during attention.

    Args:
        host: the pool to read pages from.
        num_pages: the most pages of a tile.
        num_buffers: 1 or 2.
        device: device of the buffers.
        streams: side streams for the copies.
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
        self._format = kv_format = host.format
        pages = (num_pages,), host.kv.num_kv_heads, device
        self._buffers = [kv_format.join(kv_format.new_pages(*pages)) for _ in range(num_buffers)]
        self._decoded = kv_format.decoded_pages(num_pages, device)
        staged = torch.arange(num_pages, dtype=torch.int32)
        # By the device of a tile's page numbers.
        self._staged = {"cpu": staged, device.type: staged.to(device)}
        # A tile whose copy has started before it is read, its buffer, and the copy.
        self._next: tuple[Tile, int, Pending[None]] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        tokens = self._num_pages * self._host.kv.page_size
        stored = len(self._buffers) * self._format.layer_token_bytes
        return tokens * (stored + self._format.decoded_token_bytes)

    def tiles(
        self, layer_id: int, owner: int, host_pages: Tensor, end: int, first: int = 0
    ) -> list[Tile]:
        """Cut the pages of a request into tiles.

        Args:
            layer_id, owner: see :class:`Tile`.
            host_pages: ``[P] int32``, host page of each page of the request.
            end: position after the last token that is used.
            first: index of the first page that is used.
        """
        size = self._host.kv.page_size
        tiles = []
        for page in range(first, -(-end // size), self._num_pages):
            last = min(page + self._num_pages, -(-end // size))
            pages = host_pages[page:last]
            tiles.append(Tile(layer_id, owner, page, min(end, last * size), pages))
        return tiles

    def stream(
        self, tiles: Sequence[Tile], next_tile: Tile | None = None
    ) -> Iterator[tuple[Tile, PagedKV]]:
        """Copy tiles to the device, each one while the tile before it is attended.

        Args:
            tiles: of the same forward.
            next_tile: the first tile that is streamed after these; None: unknown. Its pages have
                been written before this call.

        Yields:
            each tile with its K and V, ``[P, Hkv, S, D]`` in the model's dtype, views of a buffer,
            valid until the next iteration.
        """
        for tile, following in zip(tiles, [*tiles[1:], next_tile], strict=False):
            yield tile, self._read(tile, following)

    def _read(self, tile: Tile, next_tile: Tile | None) -> PagedKV:
        """Copy a tile, unless its copy has started, and start to copy the next one."""
        started, buffer = self._next, 0
        # Within a forward, a position of a request has one host page.
        if started is not None and started[0][:4] == tile[:4]:
            _, buffer, copy = started
            self._next = None
        else:
            if started is not None and next_tile is None:
                buffer = 1 - started[1]
            copy = self._start(tile, buffer)
        if next_tile is not None and len(self._buffers) > 1:
            self._next = next_tile, 1 - buffer, self._start(next_tile, 1 - buffer)
        copy.join()
        count, decoded = tile.host_pages.numel(), self._decoded
        stored = StoredKV(*(x[:count] for x in self._buffers[buffer].tensors))
        if decoded is None:
            return stored.kv
        return self._format.decode(stored, PagedKV(decoded.k[:count], decoded.v[:count]))

    def _start(self, tile: Tile, buffer: int) -> Pending[None]:
        return self._streams.start("read", lambda: self._fill(tile, self._buffers[buffer]))

    def _fill(self, tile: Tile, buffer: StoredKV) -> None:
        pages = tile.host_pages
        staged = self._staged[pages.device.type][None, : pages.numel()]
        move_pages(self._host.stored(tile.layer_id), pages[None], buffer, staged)

    def discard_next(self) -> None:
        """Discard the next tile; called at the end of a forward."""
        self._next = None
