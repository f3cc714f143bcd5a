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
    device, form = coordinator.manager.device.device, records.form
    held = (coordinator.manager.host.num_pages - 1) // form.pages_per_record
    count = min(records.staging.block_rows, held)
    pages = torch.arange(1, count * form.pages_per_record + 1)
    data = torch.empty(count, form.record_bytes, dtype=torch.uint8)
    form.read(pages, data)
    measuring = Workers(1, "hisparse-measure")
    # A call that is late goes on beside the server: it may touch the store and its block alone.
    read = records.health.call(measuring, lambda: _get_s(records, data))
    measuring.close()
    if read is not None:
        read += _shortest_s(lambda: form.write(pages, data), device)
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
        slot=0,
        start=0,
        length=len(pages) * size,
        offset=0,
        host_pages=pages.int().to(manager.device.device),
        is_last=False,
    )
    slots = (pages[:, None] * size + torch.arange(size)).flatten()

    def build() -> None:
        coordinator.build_representations(0, chunk, *manager.kv_io.read_tokens(0, slots))

    return _shortest_s(build, manager.device.device) * coordinator.policy.kv.num_layers


def _get_s(records: Records, data: torch.Tensor) -> float | None:
    """Seconds to read the records ``data [n, bytes]``; None: the store refuses them."""
    probe = Namespace(
        model="probe", kv_dtype="representations", page_size=1, rank=0, num_ranks=1,
        part_bytes=(records.form.record_bytes,),
    )  # fmt: skip
    storage, staging = records.storage.within(probe), records.staging
    block = staging.take(0)
    assert block is not None, "nothing else has begun yet"
    rows = staging.rows(block, len(data))
    keys = storage.keys([secrets.token_hex(16) for _ in rows])
    try:
        staging.data[rows.start : rows.stop, : data.shape[1]] = data
        if not storage.put(keys, rows):
            return None
        return _shortest_s(lambda: storage.get(keys, rows), torch.device("cpu"))
    finally:
        storage.remove(keys)
        staging.give(block)


def _shortest_s(task: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        task()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
