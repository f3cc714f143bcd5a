"""Writes rows of a cache to a file and reads them back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.codec import decode
from hisparse.engine.prefill import PrefillChunk
from hisparse.errors import CapacityError, ConfigError, quoted
from hisparse.options import parse_object
from hisparse.transformers.fingerprint import model_fingerprint
from hisparse.transformers.model_shape import text_config
from hisparse.transformers.rows import RowStore
from hisparse.transformers.tensor_file import TensorFile, write_tensors
from hisparse.types import KVSpec, StoredKV

__all__ = ["StoredRows", "read_rows", "write_rows"]

#: Increase the version whenever older files would be read wrongly. Files of version 1 have no
#: checksums, so a damaged one would load: they are refused.
_FORMAT = "hisparse context 2"
_EXPECTED = "a file that HiSparseCache.save wrote (files of 'hisparse context 1' have no checksums)"


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


def _shape(store: RowStore, model: Any) -> dict[str, Any]:
    """Properties that a file and a cache must share."""
    kv = store.coordinator.policy.kv
    return {
        "model_type": text_config(model).model_type,
        "num_layers": kv.num_layers,
        "num_q_heads": kv.num_q_heads,
        "num_kv_heads": kv.num_kv_heads,
        "head_dim": kv.head_dim,
        "v_head_dim": kv.v_head_dim,
        "dtype": str(kv.dtype).removeprefix("torch."),
        "kv_cache_dtype": "fp8_e4m3" if kv.fp8 else "auto",
    }


def write_rows(path: Path, store: RowStore, rows: StoredRows, model: Any) -> None:
    """Write rows to a file, which is always complete: see :func:`write_tensors`.

    Args:
        path: the file; an existing file is replaced.
        store: owner of the rows.
        rows: the rows to write.
        model: the transformers model that computed the rows, or its configuration.

    Raises:
        HiSparseError: the file cannot be written.
    """
    coordinator = store.coordinator
    tensors = {"real": torch.from_numpy(rows.is_token.copy())}
    if rows.token_ids is not None:
        tensors["token_ids"] = rows.token_ids.to("cpu", torch.int64).contiguous()
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
        "shape": json.dumps(_shape(store, model)),
        "model": model_fingerprint(model),
        "algorithm": repr(coordinator.algorithm),
        "representations": json.dumps(coordinator.representations.describe()),
        "page_size": str(store.page_size),
    }
    write_tensors(path, _FORMAT, metadata, tensors)


def read_rows(
    path: Path, store: RowStore, model: Any, max_length: int, columns: int | None
) -> StoredRows:
    """Read the rows of a file into new rows of a store.

    Args:
        path: the file.
        store: gets the rows; an error leaves it as it was.
        model: the transformers model, or its configuration, which has no weights to compare.
        max_length: maximum number of columns.
        columns: number of columns to read, from the first; None for all.

    Raises:
        ConfigError: the file is damaged, has another format, model or shape, or lacks the
            requested columns.
        CapacityError: the rows do not fit.
    """
    with TensorFile(path, _FORMAT, _EXPECTED) as file:
        _check_metadata(path, file.metadata, _shape(store, model), model_fingerprint(model))
        is_token = file.read("real", torch.bool, (None, None)).numpy()
        num_stored = is_token.shape[1]
        columns = _check_columns(path, columns, num_stored)
        # State of a request may depend on the columns that are not read.
        reuse = columns == num_stored and _has_same_representations(file.metadata, store)
        if not reuse:
            _check_query_window(path, store, columns, num_stored)
        if columns > max_length:
            raise CapacityError(
                f"{path}: got {columns} columns, expected at most max_length ({max_length})"
            )
        ids = None
        if "token_ids" in file:
            ids = file.read("token_ids", torch.int64, is_token.shape)[:, :columns]
        slots = store.open(is_token.shape[0])
        rows = StoredRows(slots=slots, is_token=is_token[:, :columns], token_ids=ids)
        held = np.zeros_like(rows.lengths)
        try:
            store.grow(slots, held, rows.lengths)
            held = rows.lengths
            for row, length in enumerate(is_token.sum(1).tolist()):
                _read_row(file, row, length, store, rows, reuse)
            # What was not needed is verified too: damage is found by the first load.
            file.verify_rest()
        except BaseException:
            store.close(slots, held)
            raise
    return rows


def _check_metadata(
    path: Path, metadata: dict[str, str], shape: dict[str, Any], fingerprint: str
) -> None:
    stored = parse_object(metadata.get("shape", ""), f"{path}: shape", "{}")
    for name, value in shape.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{path}: got {name} {quoted(stored.get(name))}, expected {value!r} of this model "
                "and configuration"
            )
    saved = metadata.get("model", "")
    # A cache of a configuration knows no weights.
    if saved and fingerprint and saved != fingerprint:
        raise ConfigError(
            f"{path}: got a context of another model (fingerprint {quoted(saved)}), expected "
            f"one of this model's weights and configuration ({fingerprint!r})"
        )


def _check_columns(path: Path, columns: int | None, stored: int) -> int:
    if columns is None:
        return stored
    if not isinstance(columns, int) or not 0 < columns <= stored:
        raise ConfigError(f"{path}: got columns {columns!r}, expected 1 to the {stored} stored")
    return columns


def _has_same_representations(metadata: Mapping[str, str], store: RowStore) -> bool:
    """Whether the file holds the representations of this algorithm.

    Indexes of requests are not stored, so algorithms that build one always compute it again.
    """
    coordinator = store.coordinator
    algorithm, kinds = coordinator.algorithm, coordinator.representations.describe()
    return (
        metadata.get("algorithm") == repr(algorithm)
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


def _read_row(
    file: TensorFile, row: int, stored_length: int, store: RowStore, rows: StoredRows, reuse: bool
) -> None:
    """Read K/V of one row, and read or compute its representations.

    Args:
        file: the open file.
        row: number of the row in the file and in ``rows``.
        stored_length: tokens of the row in the file.
        store: owner of the rows.
        rows: the rows, with their host pages allocated.
        reuse: read the representations from the file; otherwise compute them from the keys.
    """
    coordinator, device, size = store.coordinator, store.device, store.page_size
    kv, representations = coordinator.policy.kv, coordinator.representations
    length = int(rows.lengths[row])
    if length == 0:
        return
    slots = rows.slots[row : row + 1]
    host_slots = store.host_slots(slots, np.array([0]), np.array([length]))
    pages = store.page_table(slots, -(-length // size))[0]
    full_pages = pages[: length // size].long()
    chunk = PrefillChunk(slot=int(slots[0]), start=0, length=length, offset=0, host_pages=pages)
    for layer in range(kv.num_layers):
        parts = (
            file.read(f"{row}.{layer}.{name}", dtype, (stored_length, kv.num_kv_heads, width))
            for name, dtype, width in _stored_parts(kv)
        )
        k, v = decode(kv, StoredKV(*(part[:length].to(device) for part in parts)))
        coordinator.manager.kv_io.write(layer, host_slots, k, v)
        if reuse:
            current = representations.read(layer, chunk.slot, full_pages)
            entries = {
                name: file.read(f"{row}.{layer}.{name}", entry.dtype, entry.shape)
                for name, entry in current.items()
            }
            representations.write(layer, chunk.slot, full_pages, entries)
        else:
            coordinator.build_representations(layer, chunk, k, v)
    store.fill_tail(chunk.slot, length)


def _stored_parts(kv: KVSpec) -> list[tuple[str, torch.dtype, int]]:
    """Name, dtype and width of each tensor of :class:`StoredKV` in a file."""
    parts = [("k", kv.stored_dtype, kv.stored_key_width), ("v", kv.stored_dtype, kv.v_head_dim)]
    return [*parts, ("scales", torch.uint8, 2)] if kv.num_scales else parts
