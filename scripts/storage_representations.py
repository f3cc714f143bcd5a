"""Measure what page representations cost after a load: built from the keys, or stored beside them.

``python -m scripts.storage_representations OUT.json --model NAME`` loads the pages of a document
of random K and V from a file store into a host pool, once with the representations in the records
and once without, and then builds the representations as the prefill after a load does. The three
take turns. What was built has to equal what was stored, bit for bit. "stored" is the difference of
the two loads, so it is as noisy as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import AutoConfig

from hisparse.cache.page_format import PageFormat
from hisparse.doctor import provenance
from hisparse.engine.step import PrefillChunk
from hisparse.eval.models import resolve
from hisparse.storage import FileStore, Namespace
from hisparse.transformers import HiSparseCache

__all__ = ["main"]

_PAGE, _SLOT, _BLOCK_BYTES = 16, 1, 8 << 20


class Records:
    """The document's pages in a store, with or without representations.

    Args:
        store: gets the pages.
        cache: its host pool has them, from page 1 on.
        entries: representations in the records, by name.
        num_pages: of the document.
    """

    def __init__(
        self, store: FileStore, cache: HiSparseCache, entries: Mapping[str, Tensor], num_pages: int
    ) -> None:
        self._store = store
        self._format = form = PageFormat(cache.coordinator.manager.host, _PAGE, entries)
        self._namespace = Namespace(
            model="random", kv_dtype=form.describe(), page_size=_PAGE, rank=0, num_ranks=1,
            part_bytes=form.part_bytes,
        )  # fmt: skip
        rows = max(1, _BLOCK_BYTES // form.record_bytes)
        self._memory = torch.empty(rows, form.record_bytes, dtype=torch.uint8)
        self._blocks = torch.arange(1, num_pages + 1).split(rows)
        for pages in self._blocks:
            form.read(pages, self._memory[: len(pages)])
            for page, row in zip(pages.tolist(), self._memory, strict=False):
                parts = [part.numpy().data for part in row.split(form.part_bytes)]
                assert store.put(self._namespace, _key(page), parts)

    def load(self) -> float:
        """Move all records into the pool. Returns seconds."""
        start = time.perf_counter()
        for pages in self._blocks:
            rows = self._memory[: len(pages)]
            keys = [_key(page) for page in pages.tolist()]
            assert all(self._store.get(self._namespace, keys, [row.numpy().data for row in rows]))
            self._format.write(pages, rows)
        return time.perf_counter() - start


def _key(page: int) -> str:
    return xxhash.xxh3_128_hexdigest(str(page).encode())


def _build(cache: HiSparseCache, num_pages: int) -> float:
    """Build the representations of the pool's pages, layer by layer. Returns seconds."""
    coordinator = cache.coordinator
    width, pages = coordinator.manager.staging_pages, torch.arange(1, num_pages + 1).int()
    start = time.perf_counter()
    for layer in range(len(cache)):
        for first in range(0, num_pages, width):
            part = pages[: min(first + width, num_pages)]
            chunk = PrefillChunk(
                slot=_SLOT, start=first * _PAGE, length=(len(part) - first) * _PAGE, offset=0,
                host_pages=part, is_last=False,
            )  # fmt: skip
            slots = (part[first:, None].long() * _PAGE + torch.arange(_PAGE)).flatten()
            k, v = coordinator.manager.kv_io.read_tokens(layer, slots)
            coordinator.build_representations(layer, chunk, k, v)
    return time.perf_counter() - start


def _are_equal(kept: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether the entries of the first pages have the expected bits."""
    return all(
        torch.equal(kept[name][:, 1 : each.shape[1] + 1].view(torch.uint8), each.view(torch.uint8))
        for name, each in expected.items()
    )


def _measure(arguments: argparse.Namespace, algorithm: str, folder: Path) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(resolve(arguments.model), dtype=arguments.dtype)
    cache = HiSparseCache(
        config, algorithm=algorithm, budget=1024, max_length=arguments.tokens + 64, device="cpu"
    )
    num_pages = arguments.tokens // _PAGE
    host, kept = cache.coordinator.manager.host, cache.coordinator.representations.of_pages
    if not kept:
        raise SystemExit(f"{algorithm}: got no representations of pages, expected some to store")
    rng = torch.Generator().manual_seed(0)
    for layer in range(len(cache)):
        for part in host.stored(layer).tensors:
            part.copy_(torch.randn(part.shape, generator=rng))
    _build(cache, num_pages)
    expected = {name: each[:, 1 : num_pages + 1].clone() for name, each in kept.items()}
    seconds: dict[str, list[float]] = {"plain": [], "stored": [], "built": []}
    same = True
    with FileStore(folder / algorithm, threads=arguments.threads) as store:
        plain, stored = (Records(store, cache, each, num_pages) for each in ({}, kept))
        tasks = {"plain": plain.load, "built": partial(_build, cache, num_pages)}
        tasks["stored"] = stored.load
        for _ in range(arguments.rounds):
            for name, task in tasks.items():
                if name != "plain":
                    for each in kept.values():
                        each.zero_()
                seconds[name].append(task())
                same &= _are_equal(kept, expected)
    page_bytes = sum(each[:, 0].nbytes for each in kept.values())
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "name": algorithm,
        "gate": "passed" if same else "failed",
        "seconds": seconds,
        "page_bytes": page_bytes,
        "share_of_kv": page_bytes / (_PAGE * host.kv.token_bytes),
        "load_s": medians["plain"],
        "built_s": medians["built"],
        "stored_s": medians["stored"] - medians["plain"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="storage_representations", description=__doc__)
    add = parser.add_argument
    add("out", type=Path, help="JSON file to write")
    add("--model", required=True, help="whose shape K and V have")
    add("--tokens", type=int, default=7000)
    add("--dtype", default="bfloat16")
    add("--algorithm", default="sketch,quest")
    add("--threads", type=int, default=2, help="that read one call's pages")
    add("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=arguments.out.absolute().parent) as folder:
        cases = [_measure(arguments, x, Path(folder)) for x in arguments.algorithm.split(",")]
    result = {
        "command": "storage-representations",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "settings": {n: x for n, x in vars(arguments).items() if n not in ("out", "algorithm")},
        "cases": cases,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for case in cases:
        print(
            f"{case['name']}: {case['share_of_kv']:.1%} of K and V; load {case['load_s']:.3f} s, "
            f"and built {case['built_s']:.3f} s, or stored {case['stored_s']:.3f} s; equal: "
            f"{case['gate']}"
        )
    return int(any(case["gate"] != "passed" for case in cases))


if __name__ == "__main__":
    sys.exit(main())
