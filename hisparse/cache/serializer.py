"""Pages as the bytes of a store: the same whatever the layout of host memory.

A record is one page of a server's radix cache, all layers of this rank. Each layer has the parts of
its storage format, ``[T, Hkv, width]`` each, and then what cannot be computed from keys again: the
entries of a model's own indexer for the page's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import read_tokens, write_tokens

#: Counted up when the order of bytes changes.
FORMAT_VERSION: Final = 1


class PageSerializer:
    """Moves pages between the host pool and the bytes of a store.

    Args:
        host: the KV pool.
        page_tokens: T, tokens of a record, a multiple of the pool's page size.
        entries: tensors ``[L, host pages, ...]`` that records hold beside K and V, by name.

    Attributes:
        page_tokens: as given.
        pages_per_record: host pages of a record.
        record_bytes: bytes of a record.
    """

    def __init__(self, host: HostKVPool, page_tokens: int, entries: Mapping[str, Tensor]) -> None:
        self._host = host
        self._kinds = [
            f"{n} {entries[n].dtype} {list(entries[n].shape[2:])}" for n in sorted(entries)
        ]
        self._entries = _sorted(entries)
        self.page_tokens = page_tokens
        self.pages_per_record = page_tokens // host.kv.page_size
        kv = host.kv
        per_page = sum(x[0, 0].nbytes for x in self._entries)
        layer = page_tokens * host.format.layer_token_bytes + self.pages_per_record * per_page
        self.record_bytes = layer * kv.num_layers

    def describe(self) -> str:
        """Dtypes and shapes of a record, for the key: another description is another format."""
        kv, kv_format = self._host.kv, self._host.format
        # 0 of a format that stores no values apart.
        values = sum(part.width for part in kv_format.parts if part.name == "v")
        shape = [kv.num_layers, kv.num_kv_heads, kv.head_dim, values]
        return " ".join([kv_format.name, str(shape), *self._kinds])

    def host_pages(self, slots: Tensor) -> Tensor:
        """Host pages of the host slots ``[records * T]`` of whole records, in order."""
        size = self._host.kv.page_size
        return slots.cpu().long()[::size] // size

    def read(self, pages: Tensor, out: Tensor) -> None:
        """Copy host pages ``[n * pages_per_record] int64`` to ``out [n, bytes] uint8``."""
        slots, offset = self._slots(pages), 0
        for layer in range(self._host.kv.num_layers):
            stored = read_tokens(self._host.stored(layer), slots)
            parts = self._host.format.split(stored)
            for part in (*parts, *(x[layer][pages.to(x.device)].cpu() for x in self._entries)):
                data = part.contiguous().view(-1).view(torch.uint8).view(len(out), -1)
                out[:, offset : offset + data.shape[1]] = data
                offset += data.shape[1]

    def write(self, pages: Tensor, data: Tensor) -> None:
        """Copy records ``data [n, bytes] uint8`` to host pages ``[n * pages_per_record] int64``."""
        slots, kv, kv_format, offset = self._slots(pages), self._host.kv, self._host.format, 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal offset
            width = dtype.itemsize * torch.Size(shape).numel() // len(data)
            part = data[:, offset : offset + width].clone(memory_format=torch.contiguous_format)
            offset += width
            return part.view(-1).view(dtype).view(shape)

        for layer in range(kv.num_layers):
            tokens = (len(slots), kv.num_kv_heads)
            parts = [take(part.dtype, *tokens, part.width) for part in kv_format.parts]
            write_tokens(kv_format.join(parts), self._host.stored(layer), slots)
            for each in self._entries:
                entries = take(each.dtype, len(pages), *each.shape[2:])
                each[layer, pages.to(each.device)] = entries.to(each.device)
        _wait_for_writes(self._entries)

    def _slots(self, pages: Tensor) -> Tensor:
        """Host slots ``[P * S] int64`` of the tokens of ``pages [P] int64``."""
        size = self._host.kv.page_size
        return (pages[:, None] * size + torch.arange(size)).flatten()


class EntrySerializer:
    """Moves representations between the engine's tensors and the bytes of a store.

    A record has the entries of one page of SGLang: by name, of all layers, of all its host pages.

    Args:
        entries: tensors ``[L, host pages, ...]``, by name.
        pages_per_record: host pages of a page of SGLang.

    Attributes:
        pages_per_record: as given.
        record_bytes: bytes of a record.
    """

    def __init__(self, entries: Mapping[str, Tensor], pages_per_record: int) -> None:
        self._entries = _sorted(entries)
        self.pages_per_record = pages_per_record
        self.record_bytes = pages_per_record * sum(x[:, 0].nbytes for x in self._entries)

    def read(self, pages: Tensor, out: Tensor) -> None:
        """Copy entries of ``pages [n * pages_per_record] int64`` to ``out [n, bytes] uint8``."""
        offset = 0
        for each in self._entries:
            found = each[:, pages.to(each.device)].cpu().contiguous()
            by_record = found.view(len(found), len(out), -1).view(torch.uint8).transpose(0, 1)
            width = by_record[0].numel()
            out[:, offset : offset + width].view(by_record.shape).copy_(by_record)
            offset += width

    def write(self, pages: Tensor, data: Tensor) -> None:
        """Copy records ``data [n, bytes] uint8`` to the entries of ``pages [n * per record]``."""
        offset = 0
        for each in self._entries:
            shape = (len(each), len(pages), *each.shape[2:])
            width = each[:, 0].nbytes * self.pages_per_record
            by_record = data[:, offset : offset + width].view(len(data), len(each), -1)
            # A copy, since the record may begin where the dtype does not.
            copied = by_record.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            entries = copied.view(-1).view(each.dtype).view(shape)
            each[:, pages.to(each.device)] = entries.to(each.device)
            offset += width
        _wait_for_writes(self._entries)


def _sorted(entries: Mapping[str, Tensor]) -> list[Tensor]:
    """Tensors ``[L, host pages, ...]`` by name; float8 as uint8, which PyTorch can index."""
    found = (entries[name] for name in sorted(entries))
    return [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in found]


def _wait_for_writes(entries: Sequence[Tensor]) -> None:
    """The forward that reads what was written runs on another stream."""
    if any(each.is_cuda for each in entries):
        torch.cuda.current_stream().synchronize()
