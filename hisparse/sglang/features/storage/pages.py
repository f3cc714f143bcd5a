"""Records of pages in hisparse's file store or in one of SGLang's storage backends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash
from torch import Tensor

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.options import StorageOptions
from hisparse.storage import FileStore, Namespace

if TYPE_CHECKING:
    from hisparse.storage.managed import ManagedStore

#: A record of a backend without checks of its own ends with xxh3_128 of its key and bytes.
CHECKSUM_BYTES: Final = 16
#: Bytes of a block: what one call reads or writes.
_BLOCK_BYTES: Final = 8 * 2**20


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

    def get_size_per_token(self) -> int:
        """Bytes of a row."""
        return self.data.shape[1]

    get_ksize_per_token = get_size_per_token

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        """Row ``index``, ``[row_bytes] uint8``, a view."""
        return self.data[index]

    def get_dummy_flat_data_page(self) -> Tensor:
        """Memory of a row, ``[row_bytes] uint8``."""
        return torch.empty_like(self.data[0])

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        """Fill row ``index`` with ``data_page [row_bytes] uint8``."""
        self.data[index] = data_page

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Addresses, and sizes in bytes, of rows ``indices [n] int64``."""
        rows = indices.tolist()
        return [self.data[row].data_ptr() for row in rows], [self.data.shape[1]] * len(rows)


@dataclass(frozen=True)
class Keys:
    """Keys of pages: hexadecimal, in a namespace."""

    namespace: Namespace
    pages: Sequence[str]

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, part: slice) -> Keys:
        """Some of them."""
        return Keys(self.namespace, self.pages[part])

    def __iter__(self) -> Iterator[str]:
        """Names NAMESPACE-PAGE, each made when it is asked for: prompts have thousands."""
        return map(f"{self.namespace.key}-".__add__, self.pages)


class FilePages:
    """Records in a :class:`FileStore`, which checks what it reads.

    This class and the others here have the same methods. Calls take as long as the store takes, and
    raise what it raises.

    Args:
        buffer: rows of a record, and of its checksum if the store has none.

    Attributes:
        buffer: as given.
        remover: removes single records; None: the store cannot.
    """

    def __init__(self, store: FileStore | ManagedStore, buffer: RecordBuffer) -> None:
        self.buffer = buffer
        self._store: Any = store
        self.remover: FileStore | ManagedStore | None = store

    def find(self, keys: Keys) -> int:
        """Length of the longest prefix of ``keys`` that is stored."""
        return int(self._store.find(keys.namespace, keys.pages))

    def get(self, keys: Keys, rows: Sequence[int]) -> list[bool | None]:
        """Read records into rows; for each True, False if it is damaged, None if it is absent."""
        found: list[bool | None] = self._store.get(
            keys.namespace, keys.pages, self._rows(keys, rows)
        )
        return found

    def put(self, keys: Keys, rows: Sequence[int]) -> bool:
        """Store the records in rows; whether all of them are stored then."""
        stored = True
        for page, record in zip(keys.pages, self._rows(keys, rows), strict=True):
            # A page that is there already is not written.
            if not self._store.put(keys.namespace, page, record):
                stored &= self._store.find(keys.namespace, [page]) == 1
        return stored

    def _rows(self, keys: Keys, rows: Sequence[int]) -> list[memoryview]:
        size = keys.namespace.page_bytes
        return [self.buffer.data[row].numpy().data[:size] for row in rows]

    def close(self) -> None:
        """Write what was put to the disk, and let go of the store."""
        self._store.close()


class ManagedPages(FilePages):
    """Records in a :class:`ManagedStore`, which writes several at a time."""

    def put(self, keys: Keys, rows: Sequence[int]) -> bool:
        return bool(self._store.put(keys.namespace, keys.pages, self._rows(keys, rows)))


class BackendPages:
    """Records with checksums in one of SGLang's backends; see :class:`FilePages`.

    Args:
        backend: SGLang's ``HiCacheStorage``.
        buffer: rows of a record and its checksum.
    """

    remover: None = None

    def __init__(self, backend: Any, buffer: RecordBuffer) -> None:
        self.buffer = buffer
        self._backend = backend
        # SGLang can inject failures and delays between it and its caller.
        self._inner = getattr(backend, "_backend", backend)
        self._by_index = _overrides(self._inner, "batch_get_v1")
        backend.register_mem_pool_host(buffer)

    def find(self, keys: Keys) -> int:
        return int(self._backend.batch_exists(list(keys)))

    def get(self, keys: Keys, rows: Sequence[int]) -> list[bool | None]:
        if self._by_index:
            found = list(self._backend.batch_get_v1(list(keys), torch.tensor(rows)))
        else:
            targets = [self.buffer.data[row] for row in rows]
            found = [x is not None for x in self._backend.batch_get(list(keys), targets)]
        return [
            torch.equal(self._stored_checksum(row), self._checksum(key, row)) if ok else None
            for key, row, ok in zip(keys, rows, found, strict=True)
        ]

    def put(self, keys: Keys, rows: Sequence[int]) -> bool:
        for key, row in zip(keys, rows, strict=True):
            self._stored_checksum(row)[:] = self._checksum(key, row)
        if self._by_index:
            return all(self._backend.batch_set_v1(list(keys), torch.tensor(rows)))
        return bool(self._backend.batch_set(list(keys), [self.buffer.data[row] for row in rows]))

    def close(self) -> None:
        if hasattr(self._inner, "close"):
            self._inner.close()

    def _stored_checksum(self, row: int) -> Tensor:
        return self.buffer.data[row, -CHECKSUM_BYTES:]

    def _checksum(self, key: str, row: int) -> Tensor:
        digest = xxhash.xxh3_128(key.encode())
        digest.update(self.buffer.data[row, :-CHECKSUM_BYTES].numpy().data)
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _overrides(backend: Any, method: str) -> bool:
    """Whether a backend overrides a method that is empty in ``HiCacheStorage``."""
    function = inspect.getattr_static(type(backend), method)
    base = next(x for x in type(backend).__mro__ if x.__name__ == "HiCacheStorage")
    return function is not inspect.getattr_static(base, method)


def open_storage(
    options: StorageOptions, record_bytes: int, rank: int, num_ranks: int
) -> FilePages | BackendPages:
    """Open the store of the options.

    Args:
        record_bytes: of the largest record.
        rank: of this process, among ``num_ranks``.
        num_ranks: of the server.

    Raises:
        HiSparseError: it cannot be opened.
    """
    # A block for each reader, and two for the writer.
    blocks, is_file = options.threads + 2, options.backend == "file"
    row_bytes = record_bytes + (0 if is_file else CHECKSUM_BYTES)
    buffer = RecordBuffer(blocks, max(1, _BLOCK_BYTES // row_bytes), row_bytes)
    if options.manager is not None:
        return ManagedPages(_managed_store(options, options.manager, num_ranks), buffer)
    if is_file:
        assert options.path is not None, "StorageOptions checks it"
        store = FileStore(options.path, options.size, ttl_s=options.ttl_s)
        return FilePages(store, buffer)
    return BackendPages(_make_backend(options, buffer, rank, num_ranks), buffer)


def _managed_store(options: StorageOptions, manager: str, num_ranks: int) -> ManagedStore:
    try:
        from hisparse.storage.managed import ManagedStore
    except ImportError as error:
        raise ConfigError(
            f"storage: manager: got {one_line(error)}, expected pip install 'hisparse[kvcm]'"
        ) from None
    lent = options.lent_bytes // num_ranks
    return ManagedStore(manager, options.manager_group, options.timeout_s, lent)


def _make_backend(options: StorageOptions, buffer: RecordBuffer, rank: int, num_ranks: int) -> Any:
    """SGLang's ``HiCacheStorage`` for the options."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=num_ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        # Keys name the rank, so that backends need not: to them each record is whole.
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="hisparse",
        extra_config=dict(options.options),
    )
    try:
        return StorageBackendFactory.create_backend(options.backend, config, buffer)
    except Exception as error:
        raise HiSparseError(
            f"storage: got backend {quoted(options.backend)}, which did not start: "
            f"{one_line(error)}; expected one that SGLang can make of its options"
        ) from error
