"""Records of pages in any of SGLang's storage backends: find, get and put, and nothing else."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, overload

import torch
import xxhash
from torch import Tensor

from hisparse.storage import Namespace

#: A record of a backend that does not check what it reads ends with xxh3_128 of its key and bytes.
CHECKSUM_BYTES: Final = 16


class RecordBuffer:
    """Host memory for records on their way; backends see it as SGLang's host pool.

    Backends that move memory by address register it once.

    Args:
        blocks: number of blocks, which calls reserve.
        block_rows: records of a block.
        row_bytes: bytes of a record.

    Attributes:
        data: ``[blocks * block_rows, row_bytes] uint8``.
        block_rows: as given.
    """

    #: What SGLang's backends read of a host pool: a "token" is a row here.
    page_size = 1
    layout = "page_first"
    dtype = torch.uint8

    def __init__(self, blocks: int, block_rows: int, row_bytes: int) -> None:
        self.data = torch.empty(blocks * block_rows, row_bytes, dtype=torch.uint8)
        self.kv_buffer = self.data
        self.block_rows = block_rows
        self._free: SimpleQueue[int] = SimpleQueue()
        for block in range(blocks):
            self._free.put(block)

    def take(self, timeout_s: float) -> int | None:
        """Reserve a block; None: none became free in time."""
        try:
            return self._free.get(timeout=timeout_s)
        except Empty:
            return None

    def give(self, block: int) -> None:
        """Free a block."""
        self._free.put(block)

    def rows(self, block: int, count: int) -> range:
        """The first ``count`` rows of a block."""
        return range(block * self.block_rows, block * self.block_rows + count)

    def get_ksize_per_token(self) -> int:
        """Bytes of a row."""
        return self.data.shape[1]

    def get_size_per_token(self) -> int:
        """Bytes of a row."""
        return self.data.shape[1]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        """A row."""
        return self.data[index]

    def get_dummy_flat_data_page(self) -> Tensor:
        """Memory like a row."""
        return torch.empty_like(self.data[0])

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        """Fill a row."""
        self.data[index] = data_page

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of rows."""
        rows = indices.tolist()
        return [self.data[row].data_ptr() for row in rows], [self.data.shape[1]] * len(rows)


class Keys(Sequence[str]):
    """Keys "NAMESPACE-PAGE" of pages, each made when it is asked for: prompts have thousands.

    Args:
        namespace: key of their namespace.
        pages: hexadecimal.
    """

    def __init__(self, namespace: str, pages: Sequence[str]) -> None:
        self.namespace, self.pages = namespace, pages

    def __len__(self) -> int:
        return len(self.pages)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> str | Keys:
        """A key, or some of them."""
        if isinstance(index, slice):
            return Keys(self.namespace, self.pages[index])
        return f"{self.namespace}-{self.pages[index]}"

    def __iter__(self) -> Iterator[str]:
        return map(f"{self.namespace}-".__add__, self.pages)


class PageStorage:
    """A backend of SGLang's, and the records of a namespace in it.

    Callers ask for the keys of pages once, when they learn of the pages: the namespace changes with
    the model's weights, and pages stay those of the weights that computed them.

    Calls take as long as the backend takes, and raise what it raises.

    Args:
        backend: SGLang's ``HiCacheStorage``.
        buffer: rows of a record and, with ``checksums``, of its checksum.
        checksums: give each record a checksum, because the backend has none.
    """

    def __init__(self, backend: Any, buffer: RecordBuffer, *, checksums: bool) -> None:
        self._backend = backend
        self._buffer = buffer
        self._inner = unwrapped(backend)
        self._by_index = _overrides(self._inner, "batch_get_v1")
        # The file store takes any sequence; others may want a list.
        self._takes_keys = hasattr(self._inner, "use")
        self._checks = checksums
        self._namespace: Namespace | None = None
        backend.register_mem_pool_host(buffer)

    def use(self, namespace: Namespace) -> None:
        """Make :meth:`keys` in ``namespace`` from now on; keys of before stay valid."""
        self._namespace = namespace
        if self._takes_keys:
            self._inner.use(namespace)

    def within(self, namespace: Namespace) -> PageStorage:
        """The same backend with another namespace in use."""
        other = copy.copy(self)
        other.use(namespace)
        return other

    @property
    def can_remove(self) -> bool:
        """Whether the backend removes single records, which SGLang's interface does not ask for."""
        return hasattr(self._inner, "batch_remove")

    def keys(self, pages: Sequence[str]) -> Keys:
        """Keys of pages of the namespace that is in use."""
        assert self._namespace is not None, "a namespace is set before its keys are asked for"
        return Keys(self._namespace.key, pages)

    def find(self, keys: Keys) -> int:
        """Length of the longest prefix of ``keys`` that is stored."""
        return int(self._backend.batch_exists(keys if self._takes_keys else list(keys)))

    def get(self, keys: Sequence[str], rows: Sequence[int]) -> list[bool | None]:
        """Read records into rows; for each True, False if it is damaged, None if it is absent."""
        keys = list(keys)
        if self._by_index:
            found = list(self._backend.batch_get_v1(keys, torch.tensor(rows)))
        else:
            targets = [self._buffer.data[row] for row in rows]
            found = [x is not None for x in self._backend.batch_get(keys, targets)]
        read = [
            self._is_whole(key, row) if ok else None
            for key, row, ok in zip(keys, rows, found, strict=True)
        ]
        if None in read and hasattr(self._inner, "take_damaged"):
            # The store drops what is damaged, and tells how many.
            for _ in range(min(self._inner.take_damaged(), read.count(None))):
                read[read.index(None)] = False
        return read

    def put(self, keys: Sequence[str], rows: Sequence[int]) -> bool:
        """Store the records in rows; whether all of them are stored then."""
        keys = list(keys)
        if self._checks:
            for key, row in zip(keys, rows, strict=True):
                self._buffer.data[row, -CHECKSUM_BYTES:] = self._checksum(key, row)
        if self._by_index:
            return all(self._backend.batch_set_v1(keys, torch.tensor(rows)))
        return bool(self._backend.batch_set(keys, [self._buffer.data[row] for row in rows]))

    def remove(self, keys: Sequence[str]) -> None:
        """Remove records; see :attr:`can_remove`."""
        self._inner.batch_remove(keys)

    def remove_unused(self, unused_s: float) -> None:
        """Remove all records of the namespace in use that were not used for so many seconds."""
        self._inner.remove_unused(self._namespace, unused_s)

    def close(self) -> None:
        """Close the backend."""
        if hasattr(self._inner, "close"):
            self._inner.close()

    def _checksum(self, key: str, row: int) -> Tensor:
        digest = xxhash.xxh3_128(key.encode())
        digest.update(self._buffer.data[row, :-CHECKSUM_BYTES].numpy().data)
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    def _is_whole(self, key: str, row: int) -> bool:
        if not self._checks:
            return True
        stored = self._buffer.data[row, -CHECKSUM_BYTES:]
        return torch.equal(stored, self._checksum(key, row))


def unwrapped(backend: Any) -> Any:
    """The backend behind SGLang's injector of failures."""
    return getattr(backend, "_backend", backend)


def _overrides(backend: Any, method: str) -> bool:
    """Whether a backend has a method of its own, in place of ``HiCacheStorage``'s empty one."""
    function = inspect.getattr_static(type(backend), method)
    base = next(x for x in type(backend).__mro__ if x.__name__ == "HiCacheStorage")
    return function is not inspect.getattr_static(base, method)
