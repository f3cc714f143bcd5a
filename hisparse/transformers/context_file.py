"""A stored context: rows of a cache in a safetensors file."""

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
    """Rows, beside their K/V.

    Attributes:
        slots: ``[B]``, request slots.
        real: ``[B, columns] bool``, False at padding.
        token_ids: ``[B, columns] int64``, or None.
    """

    slots: np.ndarray
    real: np.ndarray
    token_ids: Tensor | None

    @property
    def lengths(self) -> np.ndarray:
        """``[B]``, tokens of each row."""
        lengths: np.ndarray = self.real.sum(1)
        return lengths


def _shape(store: RowStore, model_type: str) -> dict[str, Any]:
    """What a file and a cache have to agree in."""
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
    """Write rows to a file, which appears under its name once it is complete."""
    coordinator = store.coordinator
    tensors = {"real": torch.from_numpy(rows.real.copy())}
    if rows.token_ids is not None:
        tensors["token_ids"] = rows.token_ids.cpu().contiguous()
    for row, (slot, length) in enumerate(
        zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)
    ):
        own = np.array([slot]), np.array([0]), np.array([length])
        host_slots = store.host_slots(*own)
        full = store.page_table(own[0], length // store.page_size)[0].long()
        for layer in range(coordinator.policy.kv.num_layers):
            stored = coordinator.manager.kv_io.read_stored(layer, host_slots)
            for name, part in zip(StoredKV._fields, stored.tensors, strict=False):
                tensors[f"{row}.{layer}.{name}"] = part.cpu().contiguous()
            for name, entries in coordinator.representations.read(layer, slot, full).items():
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
    """Bring the rows of a file into a store, as many columns of them as said, or all.

    Raises:
        ConfigError: the file is none of these, or of another shape.
        CapacityError: its rows do not fit.
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
        real = file.get_tensor("real").numpy()
        stored, columns = real.shape[1], _check_columns(path, columns, real.shape[1])
        # What is remembered of a request may be about the columns that are left out.
        known = columns == stored and _is_known(metadata, store)
        if not known:
            _check_queries(path, store, columns, stored)
        real = real[:, :columns]
        if real.shape[1] > max_length:
            raise CapacityError(
                f"{path}: got {real.shape[1]} columns, expected at most max_length ({max_length})"
            )
        slots = store.open(real.shape[0])
        ids = file.get_tensor("token_ids") if "token_ids" in file.keys() else None  # noqa: SIM118
        ids = None if ids is None else ids[:, :columns]
        rows = StoredRows(slots=slots, real=real, token_ids=ids)
        nothing = np.zeros_like(rows.lengths)
        try:
            store.grow(slots, nothing, rows.lengths)
        except CapacityError:
            store.close(slots, nothing)
            raise
        for row in range(slots.size):
            _read_row(file, row, store, rows, known)
    return rows


def _check_metadata(path: Path, metadata: dict[str, str], expected: dict[str, Any]) -> None:
    if metadata.get("format") != _FORMAT:
        raise ConfigError(
            f"{path}: got format {metadata.get('format')!r}, expected {_FORMAT!r}, as "
            "HiSparseCache.save writes it"
        )
    # Older files were written when there was no other way to store.
    stored = {"kv_cache_dtype": "auto"} | json.loads(metadata["shape"])
    for name, value in expected.items():
        if stored[name] != value:
            raise ConfigError(
                f"{path}: got {name} {stored[name]!r}, expected {value!r} as this model and "
                "configuration have it"
            )


def _check_columns(path: Path, columns: int | None, stored: int) -> int:
    if columns is None:
        return stored
    if not isinstance(columns, int) or not 0 < columns <= stored:
        raise ConfigError(f"{path}: got columns {columns!r}, expected 1 to the {stored} stored")
    return columns


def _is_known(metadata: dict[str, str], store: RowStore) -> bool:
    """Whether the file has what the algorithm remembers; indexes of requests are made anew."""
    coordinator = store.coordinator
    algorithm, kinds = coordinator.algorithm, coordinator.representations.describe()
    return (
        metadata["algorithm"] == repr(algorithm)
        and metadata.get("page_size") == str(store.page_size)
        and metadata.get("representations") == json.dumps(kinds)
        and not algorithm.host_token_bytes(coordinator.policy.kv)
    )


def _check_queries(path: Path, store: RowStore, columns: int, stored: int) -> None:
    """An algorithm that looks at the prompt's last queries has to be given them again."""
    algorithm = store.coordinator.algorithm
    # A column alone would be a decode step.
    most = stored - max(2, algorithm.query_window)
    if algorithm.query_window and columns > most:
        go_on = f"columns up to {most}, after which the prompt goes on"
        raise ConfigError(
            f"{path}: got {columns} of its {stored} columns, but {algorithm} needs the prompt's "
            "last queries, which only a file of the same settings and page size has; expected "
            f"{go_on if most > 0 else 'a longer file'}"
        )


def _read_row(file: Any, row: int, store: RowStore, rows: StoredRows, known: bool) -> None:
    """K/V of one row, and its representations: as stored, or made anew for another algorithm."""
    coordinator, device, size = store.coordinator, store.device, store.page_size
    kv = coordinator.policy.kv
    length = int(rows.lengths[row])
    if length == 0:
        return
    own = rows.slots[row : row + 1]
    host_slots = store.host_slots(own, np.array([0]), np.array([length]))
    pages = store.page_table(own, -(-length // size))[0]
    chunk = PrefillChunk(slot=int(own[0]), start=0, length=length, offset=0, host_pages=pages)
    for layer in range(kv.num_layers):
        fields = StoredKV._fields if kv.fp8 else PagedKV._fields
        stored = (file.get_slice(f"{row}.{layer}.{name}") for name in fields)
        parts = (part[:length].to(device) for part in stored)
        k, v = decode(kv, StoredKV(*parts))
        coordinator.manager.kv_io.write(layer, host_slots, k, v)
        if known:
            names = coordinator.representations.describe()
            entries = {name: file.get_tensor(f"{row}.{layer}.{name}") for name in names}
            full = pages[: length // size].long()
            coordinator.representations.write(layer, chunk.slot, full, entries)
        else:
            coordinator.build_representations(layer, chunk, k, v)
    store.fill_tail(int(own[0]), length)
