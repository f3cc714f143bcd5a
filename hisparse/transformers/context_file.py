"""Writes rows of a cache to a safetensors file and reads them back."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hisparse.cache.codec import decode
from hisparse.engine.step import PrefillChunk
from hisparse.errors import CapacityError, ConfigError
from hisparse.transformers.rows import RowStore
from hisparse.types import PagedKV, StoredKV

__all__ = ["StoredRows", "read_rows", "write_rows"]

_FORMAT = "hisparse context 1"


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Rows of a store, without their K/V.

    Attributes:
        slots: ``[B]``, request slots.
        is_token: ``[B, columns] bool``, False at padding.
        token_ids: ``[B, columns] int64``, or None.
    """

    slots: np.ndarray
    is_token: np.ndarray
    token_ids: Tensor | None

    @property
    def lengths(self) -> np.ndarray:
        """``[B]``, tokens of each row."""
        lengths: np.ndarray = self.is_token.sum(1)
        return lengths


def _shape(store: RowStore, model_type: str) -> dict[str, Any]:
    """Properties that a file and a cache must share."""
    kv = store.coordinator.policy.kv
    return {
        "model_type": model_type,
        "num_layers": kv.num_layers,
        "num_q_heads": kv.num_q_heads,
        "num_kv_heads": kv.num_kv_heads,
        "head_dim": kv.head_dim,
        "v_head_dim": kv.v_head_dim,
        "dtype": str(kv.dtype).removeprefix("torch."),
        "kv_cache_dtype": "fp8_e4m3" if kv.fp8 else "auto",
    }


def write_rows(path: Path, store: RowStore, rows: StoredRows, model_type: str) -> None:
    """Write rows to a file.

    The function writes a temporary file first and renames it, so that ``path`` is always complete.

    Args:
        path: the file; an existing file is replaced.
        store: owner of the rows.
        rows: the rows to write.
        model_type: the model's type in transformers, stored in the file.
    """
    coordinator = store.coordinator
    tensors = {"real": torch.from_numpy(rows.is_token.copy())}
    if rows.token_ids is not None:
        tensors["token_ids"] = rows.token_ids.cpu().contiguous()
    for row, (slot, length) in enumerate(
        zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)
    ):
        slots = np.array([slot])
        host_slots = store.host_slots(slots, np.array([0]), np.array([length]))
        full_pages = store.page_table(slots, length // store.page_size)[0].long()
        for layer in range(coordinator.policy.kv.num_layers):
            stored = coordinator.manager.kv_io.read_stored(layer, host_slots)
            for name, part in zip(StoredKV._fields, stored.tensors, strict=False):
                tensors[f"{row}.{layer}.{name}"] = part.cpu().contiguous()
            for name, entries in coordinator.representations.read(layer, slot, full_pages).items():
                tensors[f"{row}.{layer}.{name}"] = entries.cpu().contiguous()
    metadata = {
        "format": _FORMAT,
        "shape": json.dumps(_shape(store, model_type)),
        "algorithm": repr(coordinator.algorithm),
        "representations": json.dumps(coordinator.representations.describe()),
        "page_size": str(store.page_size),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, str(temporary), metadata)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_rows(
    path: Path, store: RowStore, model_type: str, max_length: int, columns: int | None
) -> StoredRows:
    """Read the rows of a file into new rows of a store.

    Args:
        path: the file.
        store: gets the rows.
        model_type: the model's type in transformers.
        max_length: maximum number of columns.
        columns: number of columns to read, from the first; None for all.

    Raises:
        ConfigError: the file has another format or shape, or lacks the requested columns.
        CapacityError: the rows do not fit.
    """
    try:
        file: Any = safe_open(str(path), "pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: {error}, expected a file that HiSparseCache.save wrote"
        ) from None
    with file:
        metadata = file.metadata() or {}
        _check_metadata(path, metadata, _shape(store, model_type))
        is_token = file.get_tensor("real").numpy()
        num_stored = is_token.shape[1]
        columns = _check_columns(path, columns, num_stored)
        # State of a request may depend on the columns that are not read.
        reuse = columns == num_stored and _has_same_representations(metadata, store)
        if not reuse:
            _check_query_window(path, store, columns, num_stored)
        if columns > max_length:
            raise CapacityError(
                f"{path}: got {columns} columns, expected at most max_length ({max_length})"
            )
        slots = store.open(is_token.shape[0])
        ids = file.get_tensor("token_ids") if "token_ids" in file.keys() else None  # noqa: SIM118
        ids = None if ids is None else ids[:, :columns]
        rows = StoredRows(slots=slots, is_token=is_token[:, :columns], token_ids=ids)
        no_tokens = np.zeros_like(rows.lengths)
        try:
            store.grow(slots, no_tokens, rows.lengths)
        except CapacityError:
            store.close(slots, no_tokens)
            raise
        for row in range(slots.size):
            _read_row(file, row, store, rows, reuse)
    return rows


def _check_metadata(path: Path, metadata: dict[str, str], expected: dict[str, Any]) -> None:
    if metadata.get("format") != _FORMAT:
        raise ConfigError(
            f"{path}: got format {metadata.get('format')!r}, expected {_FORMAT!r}, which "
            "HiSparseCache.save writes"
        )
    # Files from before fp8 was supported do not name their kv_cache_dtype.
    stored = {"kv_cache_dtype": "auto"} | json.loads(metadata["shape"])
    for name, value in expected.items():
        if stored[name] != value:
            raise ConfigError(
                f"{path}: got {name} {stored[name]!r}, expected {value!r} of this model and "
                "configuration"
            )


def _check_columns(path: Path, columns: int | None, stored: int) -> int:
    if columns is None:
        return stored
    if not isinstance(columns, int) or not 0 < columns <= stored:
        raise ConfigError(f"{path}: got columns {columns!r}, expected 1 to the {stored} stored")
    return columns


def _has_same_representations(metadata: dict[str, str], store: RowStore) -> bool:
    """Whether the file holds the representations of this algorithm.

    Indexes of requests are not stored, so algorithms that build one always compute it again.
    """
    coordinator = store.coordinator
    algorithm, kinds = coordinator.algorithm, coordinator.representations.describe()
    return (
        metadata["algorithm"] == repr(algorithm)
        and metadata.get("page_size") == str(store.page_size)
        and metadata.get("representations") == json.dumps(kinds)
        and not algorithm.host_token_bytes(coordinator.policy.kv)
    )


def _check_query_window(path: Path, store: RowStore, columns: int, num_stored: int) -> None:
    """Require that an algorithm which uses the prompt's last queries computes them after the load.

    The file does not hold queries.
    """
    algorithm = store.coordinator.algorithm
    # At least two columns have to follow: one column would be a decode step.
    max_columns = num_stored - max(2, algorithm.query_window)
    if algorithm.query_window and columns > max_columns:
        choice = "a longer file"
        if max_columns > 0:
            choice = f"columns up to {max_columns}, and a forward of the rest of the prompt"
        raise ConfigError(
            f"{path}: got {columns} of {num_stored} columns, but {algorithm} needs the prompt's "
            "last queries, which only a file of the same settings and page size replaces; expected "
            f"{choice}"
        )


def _read_row(file: Any, row: int, store: RowStore, rows: StoredRows, reuse: bool) -> None:
    """Read K/V of one row, and read or compute its representations.

    Args:
        file: the open safetensors file.
        row: number of the row in the file and in ``rows``.
        store: owner of the rows.
        rows: the rows, with their host pages allocated.
        reuse: read the representations from the file; otherwise compute them from the keys.
    """
    coordinator, device, size = store.coordinator, store.device, store.page_size
    kv = coordinator.policy.kv
    length = int(rows.lengths[row])
    if length == 0:
        return
    slots = rows.slots[row : row + 1]
    host_slots = store.host_slots(slots, np.array([0]), np.array([length]))
    pages = store.page_table(slots, -(-length // size))[0]
    chunk = PrefillChunk(slot=int(slots[0]), start=0, length=length, offset=0, host_pages=pages)
    for layer in range(kv.num_layers):
        fields = StoredKV._fields if kv.fp8 else PagedKV._fields
        stored = (file.get_slice(f"{row}.{layer}.{name}") for name in fields)
        parts = (part[:length].to(device) for part in stored)
        k, v = decode(kv, StoredKV(*parts))
        coordinator.manager.kv_io.write(layer, host_slots, k, v)
        if reuse:
            names = coordinator.representations.describe()
            entries = {name: file.get_tensor(f"{row}.{layer}.{name}") for name in names}
            full_pages = pages[: length // size].long()
            coordinator.representations.write(layer, chunk.slot, full_pages, entries)
        else:
            coordinator.build_representations(layer, chunk, k, v)
    store.fill_tail(chunk.slot, length)
