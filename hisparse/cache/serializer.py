"""Pages as the bytes of a store: the same whatever the layout of host memory.

A record is one page of a server's radix cache, all layers of this rank. Each layer has the parts of
its storage format, ``[T, Hkv, width]`` each, and then what cannot be computed from keys again: the
entries of a model's own indexer for the page's tokens. Records of
representations have only entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import read_tokens, write_tokens

#: Counted up when the order of bytes changes.
FORMAT_VERSION: Final = 1


class PageSerializer:
    """Moves pages between the memory of the engine and the bytes of a store.

    Args:
        page_tokens: T, tokens of a record, a multiple of the pool's page size.
        entries: tensors ``[n, host pages, ...]`` that records hold beside K and V, by name: n of L
            layers have them.
        with_kv: whether records hold K and V; if not, only ``entries``.

    Attributes:
        host, page_tokens: as given.
        pages_per_record: host pages of a record.
        record_bytes: bytes of a record.
    """

    def __init__(
        self,
        host: HostKVPool,
        page_tokens: int,
        entries: Mapping[str, Tensor],
        *,
        with_kv: bool = True,
    ) -> None:
        self.host, self._with_kv = host, with_kv
        self._kinds = [
            f"{n} {entries[n].dtype} {list(entries[n].shape[2:])}" for n in sorted(entries)
        ]
        self._entries = _sorted(entries)
        self._num_layers = (
            host.kv.num_layers if with_kv else max(map(len, self._entries), default=0)
        )
        self.page_tokens = page_tokens
        self.pages_per_record = page_tokens // host.kv.page_size
        per_page = sum(x[:, 0].nbytes for x in self._entries)
        layer = page_tokens * host.format.layer_token_bytes * with_kv
        self.record_bytes = layer * self._num_layers + self.pages_per_record * per_page

    def describe(self) -> str:
        """Dtypes and shapes of a record, for the key: another description is another format."""
        kv, kv_format = self.host.kv, self.host.format
        # 0 of a format that stores no values apart.
        values = sum(part.width for part in kv_format.parts if part.name == "v")
        shape = [kv.num_layers, kv.num_kv_heads, kv.head_dim, values]
        return " ".join([kv_format.name, str(shape), *self._kinds])

    def host_pages(self, slots: Tensor) -> Tensor:
        """``[n] int64``, host pages of whole records in host ``slots [records * T]``, integers."""
        size = self.host.kv.page_size
        return slots.cpu().long()[::size] // size

    def read(self, pages: Tensor, out: Tensor) -> None:
        """Copy host pages ``[n * pages_per_record] int64`` to ``out [n, bytes] uint8``."""
        slots, offset, parts = self._slots(pages), 0, tuple[Tensor, ...]()
        for layer in range(self._num_layers):
            if self._with_kv:
                parts = self.host.format.split(read_tokens(self.host.stored(layer), slots))
            entries = (x[layer] for x in self._entries if layer < len(x))
            for part in (*parts, *(x[pages.to(x.device)].cpu() for x in entries)):
                data = part.contiguous().view(-1).view(torch.uint8).view(len(out), -1)
                out[:, offset : offset + data.shape[1]] = data
                offset += data.shape[1]

    def write(self, pages: Tensor, data: Tensor) -> None:
        """Copy records ``data [n, bytes] uint8`` to host pages ``[n * pages_per_record] int64``."""
        slots, kv, kv_format, offset = self._slots(pages), self.host.kv, self.host.format, 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal offset
            width = dtype.itemsize * torch.Size(shape).numel() // len(data)
            # A copy, since the record may begin where the dtype does not.
            part = data[:, offset : offset + width].clone(memory_format=torch.contiguous_format)
            offset += width
            return part.view(-1).view(dtype).view(shape)

        for layer in range(self._num_layers):
            if self._with_kv:
                tokens = (len(slots), kv.num_kv_heads)
                parts = [take(part.dtype, *tokens, part.width) for part in kv_format.parts]
                write_tokens(kv_format.join(parts), self.host.stored(layer), slots)
            for each in (x for x in self._entries if layer < len(x)):
                entries = take(each.dtype, len(pages), *each.shape[2:])
                each[layer, pages.to(each.device)] = entries.to(each.device)
        # The forward that reads what was written runs on another stream.
        if any(each.is_cuda for each in self._entries):
            torch.cuda.current_stream().synchronize()

    def _slots(self, pages: Tensor) -> Tensor:
        """Host slots ``[P * S] int64`` of the tokens of ``pages [P] int64``."""
        size = self.host.kv.page_size
        return (pages[:, None] * size + torch.arange(size)).flatten()


def _sorted(entries: Mapping[str, Tensor]) -> list[Tensor]:
    """Plain tensors ``[L, host pages, ...]`` by name; float8 as uint8, which PyTorch can index."""
    found = (entries[name].as_subclass(Tensor) for name in sorted(entries))
    return [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in found]
