"""Whether to read representations from a store or to build them from keys, by what each takes."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.step import PrefillChunk
from hisparse.sglang.storage.records import Records
from hisparse.sglang.storage.threads import Workers
from hisparse.storage import Namespace

__all__ = ["reads_faster"]

logger = logging.getLogger("hisparse")

#: Of so many measurements the shortest counts; one before them makes files and memory warm.
_ROUNDS: Final = 3


def reads_faster(records: Records, coordinator: SparseCoordinator) -> bool:
    """Whether representations are read in less time than they are built, measured with a few pages.

    Called before the first request: it fills entries of the first host pages. Nothing of it stays
    in the store.

    Args:
        records: of representations; calls take as long as the store takes.
        coordinator: of the engine.
    """
    device, per_record = coordinator.manager.device.device, records.form.pages_per_record
    count = min(records.staging.block_rows, (coordinator.manager.host.num_pages - 1) // per_record)
    pages = torch.arange(1, count * per_record + 1)
    measuring = Workers(1, "hisparse-measure")
    read = records.health.call(measuring, lambda: _read_s(records, pages, device))
    measuring.close()
    build = _build_s(coordinator, pages)
    faster = read is not None and read < build
    logger.info(
        "hisparse: storage: for each page, representations take %s to read and %.0f us to build, "
        "so they are %s",
        "too long" if read is None else f"{1e6 * read / count:.0f} us",
        1e6 * build / count,
        "stored" if faster else "built",
    )
    return faster


def _build_s(coordinator: SparseCoordinator, pages: torch.Tensor) -> float:
    """Seconds to build the representations of ``pages [P] int64``, all layers."""
    manager, size = coordinator.manager, coordinator.policy.kv.page_size
    chunk = PrefillChunk(
        slot=0, start=0, length=len(pages) * size, offset=0, host_pages=pages.int(), is_last=False
    )
    slots = (pages[:, None] * size + torch.arange(size)).flatten()

    def build() -> None:
        coordinator.build_representations(0, chunk, *manager.kv_io.read_tokens(0, slots))

    return _shortest_s(build, manager.device.device) * coordinator.policy.kv.num_layers


def _read_s(records: Records, pages: torch.Tensor, device: torch.device) -> float | None:
    """Seconds to read the representations of ``pages [P] int64``; None: the store refuses them."""
    size = records.form.record_bytes
    probe = Namespace(
        model="probe", kv_dtype="representations", page_size=1, rank=0, num_ranks=1,
        part_bytes=(size,),
    )  # fmt: skip
    storage = records.storage.within(probe)
    rows = records.staging.rows(0, len(pages) // records.form.pages_per_record)
    keys = storage.keys([secrets.token_hex(16) for _ in rows])
    data = records.staging.data[rows.start : rows.stop, :size]
    records.form.read(pages, data)
    if not storage.put(keys, rows):
        return None

    def read() -> None:
        storage.get(keys, rows)
        records.form.write(pages, data)

    seconds = _shortest_s(read, device)
    storage.remove(keys)
    return seconds


def _shortest_s(task: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        task()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
