"""Device memory that host pages stream through, tile by tile."""

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import move_pages
from hisparse.types import PagedKV, StoredKV


class Tile(NamedTuple):
    """Pages of one request that are read together.

    Attributes:
        first: index of the first page in the sequence.
        end: position after the last token that is used.
        host_pages: ``[P] int32``; a tensor in host memory lets the copy engine move the pages.
    """

    first: int
    end: int
    host_pages: Tensor


class Staging:
    """A buffer of one tile.

    Args:
        host: the pool to read pages from.
        num_pages: the most pages of a tile.
        device: device of the buffer.

    Attributes:
        num_pages: as given.
    """

    def __init__(self, host: HostKVPool, num_pages: int, device: torch.device) -> None:
        self._host = host
        self.num_pages = num_pages
        self._format = kv_format = host.format
        self._buffer = kv_format.join(
            kv_format.new_pages((num_pages,), host.kv.num_kv_heads, device)
        )
        self._decoded = kv_format.decoded_pages(num_pages, device)
        staged = torch.arange(num_pages, dtype=torch.int32)
        # By the device of a tile's page numbers.
        self._staged = {"cpu": staged, device.type: staged.to(device)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer, as stored and as decoded."""
        tokens = self.num_pages * self._host.kv.page_size
        return tokens * (self._format.layer_token_bytes + self._format.decoded_token_bytes)

    def tiles(self, host_pages: Tensor, end: int, first: int = 0) -> list[Tile]:
        """Cut the pages of a request into tiles.

        Args:
            host_pages: ``[P] int32``, host page of each page of the request.
            end: position after the last token that is used.
            first: index of the first page that is used.
        """
        size = self._host.kv.page_size
        tiles = []
        for page in range(first, -(-end // size), self.num_pages):
            last = min(page + self.num_pages, -(-end // size))
            tiles.append(Tile(page, min(end, last * size), host_pages[page:last]))
        return tiles

    def read(self, layer_id: int, tile: Tile) -> PagedKV:
        """K and V of a tile, ``[P, Hkv, S, D]`` each in the model's dtype, on the device.

        They are views of the buffer, valid until the next call.
        """
        pages, decoded = tile.host_pages, self._decoded
        count = pages.numel()
        staged = self._staged[pages.device.type][None, :count]
        move_pages(self._host.stored(layer_id), pages[None], self._buffer, staged)
        stored = StoredKV(*(x[:count] for x in self._buffer.tensors))
        if decoded is None:
            return stored.kv
        return self._format.decode(stored, PagedKV(decoded.k[:count], decoded.v[:count]))
