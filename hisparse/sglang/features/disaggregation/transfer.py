"""What SGLang's transfer engines and retractions see of the KV pool: addresses, and copies."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.cache import HostKVPool
from hisparse.cache.serializer import PageSerializer
from hisparse.sglang.session import require_session


class Buffers(NamedTuple):
    """Memory that a transfer engine registers, one entry a buffer.

    Attributes:
        pointers: addresses.
        lengths: bytes.
        item_lengths: bytes of one of SGLang's pages.
    """

    pointers: list[int]
    lengths: list[int]
    item_lengths: list[int]


def kv_buffers(host: HostKVPool, page_tokens: int) -> Buffers:
    """The keys of each layer, then the values of each layer unless they are part of the keys.

    The order of bytes is that of SGLang's own pools, so either end may be one.

    Args:
        host: the pool, in the layout ``layer_first``, as a server of this feature has it.
        page_tokens: tokens of one of SGLang's pages.
    """
    layers = range(host.kv.num_layers)
    names = [part.name for part in host.format.parts if part.name != "scales"]
    parts = [getattr(host.layer(layer), name) for name in names for layer in layers]
    return _buffers(parts, page_tokens // host.kv.page_size)


def scale_buffers(host: HostKVPool, page_tokens: int) -> Buffers:
    """The scales of each layer's keys and values, if they have any."""
    layers = range(host.kv.num_layers)
    scales = (pool.k for layer in layers for pool in host.stored(layer).pools[1:])
    return _buffers(scales, page_tokens // host.kv.page_size)


def entry_buffers(entries: Mapping[str, Tensor], pages: int) -> Buffers:
    """Representations that cannot be built from K and V: an indexer's keys.

    Args:
        entries: ``[L, host pages, ...]``, by name.
        pages: host pages of one of SGLang's pages.
    """
    return _buffers((layer for name in sorted(entries) for layer in entries[name]), pages)


def _buffers(parts: Iterable[Tensor], pages: int) -> Buffers:
    """``parts [host pages, ...]``, whose memory is contiguous from the first to the last page."""
    found = Buffers([], [], [])
    for part in parts:
        page_bytes = part[0].numel() * part.element_size()
        found.pointers.append(part.data_ptr())
        found.lengths.append(len(part) * page_bytes)
        found.item_lengths.append(pages * page_bytes)
    return found


class Transfers:
    """What a KV pool in host memory gives to SGLang's transfers and retractions."""

    host: HostKVPool
    page_size: int

    def get_contiguous_buf_infos(self) -> Buffers:
        """What a transfer between a prefill and a decode server moves."""
        return kv_buffers(self.host, self.page_size)

    def get_cpu_copy(self, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        """Copies of a request that a decode server retracts, ``[pages, bytes] uint8``.

        Args:
            indices: ``[T]``, its host slots, from the start of a page on.
        """
        serializer = self._serializer()
        pages = serializer.host_pages(indices)
        copies = torch.empty(len(pages), serializer.record_bytes, dtype=torch.uint8)
        serializer.read(pages, copies)
        return copies

    def load_cpu_copy(self, copies: Tensor, indices: Tensor, *_: Any, **__: Any) -> None:
        """Write the copies of :meth:`get_cpu_copy` to ``indices [T]``."""
        serializer = self._serializer()
        serializer.write(serializer.host_pages(indices), copies)

    def _serializer(self) -> PageSerializer:
        return PageSerializer(self.host, self.host.kv.page_size, _stored_entries())


class IndexerTransfers(Transfers):
    """The same of a model with an indexer, whose keys move beside the latents."""

    def get_compress_tail_buf_infos(self) -> Buffers:
        """No buffers: an index key belongs to one token."""
        return Buffers([], [], [])

    def get_state_buf_infos(self) -> Buffers:
        """The algorithm's index keys."""
        return entry_buffers(_stored_entries(), self.page_size // self.host.kv.page_size)


def _stored_entries() -> dict[str, Tensor]:
    """The engine's saved tensors of pages by name, ``[L, host pages, *shape]``."""
    return require_session().coordinator.stored_entries()
