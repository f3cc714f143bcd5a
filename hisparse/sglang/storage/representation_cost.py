"""Whether to read representations from a store or to build them from keys, by what each takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.step import PrefillChunk
from hisparse.sglang.storage.page_storage import PageStorage, Staging
from hisparse.sglang.storage.representations import RepresentationFormat

__all__ = ["build_s", "read_s"]

#: Each time is the least of so many.
_TRIES: Final = 3


def build_s(coordinator: SparseCoordinator, num_pages: int) -> float:
    """Seconds to build the representations of a host page, all layers.

    Called before the first request: it fills the entries of the first host pages.

    Args:
        coordinator: of the engine.
        num_pages: host pages to build at a time.
    """
    manager, size = coordinator.manager, coordinator.policy.kv.page_size
    pages = torch.arange(1, num_pages + 1)
    chunk = PrefillChunk(
        slot=0, start=0, length=num_pages * size, offset=0, host_pages=pages.int(), is_last=False
    )
    slots = (pages[:, None] * size + torch.arange(size)).flatten()

    def build() -> None:
        k, v = manager.kv_io.read_tokens(0, slots)
        coordinator.build_representations(0, chunk, k, v)

    return _least_s(build, manager.device.device) * coordinator.policy.kv.num_layers / num_pages


def read_s(
    storage: PageStorage, form: RepresentationFormat, staging: Staging, device: torch.device
) -> float:
    """Seconds to read the representations of a host page, with records written for the purpose.

    Args:
        storage: uses a namespace for them.
        form: of the records; its first host pages are overwritten.
        staging: memory for records; one block is used.
        device: of the representations.
    """
    rows = staging.rows(0, staging.block_rows)
    keys = storage.keys([f"{row:04x}" for row in rows])
    pages = torch.arange(1, len(rows) * form.pages_per_record + 1)
    data = staging.data[rows.start : rows.stop, : form.record_bytes]
    form.read(pages, data)
    if not storage.put(keys, rows):
        return float("inf")

    def read() -> None:
        storage.get(keys, rows)
        form.write(pages, data)

    return _least_s(read, device) / len(pages)


def _least_s(task: Callable[[], Any], device: torch.device) -> float:
    """The least time of some runs, in seconds; the first of them warms caches up."""
    seconds = []
    for _ in range(_TRIES + 1):
        start = time.perf_counter()
        task()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
