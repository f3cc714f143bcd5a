"""Measure how fast pages are read from a file store, beside ``dd`` on the same files.

``python -m scripts.storage_speed OUT.json`` writes pages of random bytes to a new store and reads
all of them in rounds: with ``FileStore.get`` and with ``dd bs=1M``, both once from the disk and
once from the page cache. The two take turns, and their order alternates by round, so that other
work on the machine meets both. Before a read from the disk the files are written out and dropped
from the page cache (``posix_fadvise``, DONTNEED); a round counts as cold only if nothing of them is
left there, which is asked by mapping them. Bytes are those of the pages for the store and those of
the files, headers included, for dd. Every byte that the store reads is compared with what was
written. "dd large" is dd with a buffer as large as those of a call together: 1 MiB stays in the
processor's cache, and what pages are read into may not. It exits with 1 if bytes differ, or if the
median ratio is below 0.7 in either case.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hisparse.doctor import provenance
from hisparse.storage import FileStore, Namespace
from hisparse.units import format_bytes

__all__ = ["main"]

_LIMIT = 0.7


class Pages:
    """A store with pages, and buffers for some of them.

    Args:
        arguments: of the command line.
        folder: of the store.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        part, more = divmod(arguments.page_bytes, arguments.parts)
        self.namespace = Namespace(
            model="random bytes", kv_dtype="uint8", page_size=16, rank=0, num_ranks=1,
            part_bytes=tuple(part + (i < more) for i in range(arguments.parts)),
        )  # fmt: skip
        count = arguments.bytes // arguments.page_bytes
        self.keys = [xxhash.xxh3_128_hexdigest(str(i).encode()) for i in range(count)]
        self.store = FileStore(folder, threads=arguments.threads)
        self._expected = []
        rng = np.random.default_rng(0)
        for key in self.keys:
            page = rng.bytes(self.namespace.page_bytes)
            self._expected.append(xxhash.xxh3_128_digest(page))
            parts, start = [], 0
            for size in self.namespace.part_bytes:
                parts.append(memoryview(page)[start : start + size])
                start += size
            assert self.store.put(self.namespace, key, parts)
        self.store.flush()
        size = -(-self.namespace.page_bytes // 4096) * 4096
        memory = memoryview(mmap.mmap(-1, size * arguments.batch))
        self.buffers = [
            memory[i * size :][: self.namespace.page_bytes] for i in range(arguments.batch)
        ]
        self.files = sorted((folder / "segments").glob("*.seg"))

    def batches(self) -> list[range]:
        """Numbers of the pages of each call."""
        size = len(self.buffers)
        return [range(i, min(i + size, len(self.keys))) for i in range(0, len(self.keys), size)]

    def read(self) -> float:
        """Read all pages. Returns bytes a second."""
        seconds = 0.0
        for numbers in self.batches():
            keys = [self.keys[i] for i in numbers]
            start = time.perf_counter()
            found = self.store.get(self.namespace, keys, self.buffers[: len(keys)])
            seconds += time.perf_counter() - start
            assert all(found), "a page is absent"
        return len(self.keys) * self.namespace.page_bytes / seconds

    def is_right(self) -> bool:
        """Whether every page has the bytes that were written."""
        for numbers in self.batches():
            keys = [self.keys[i] for i in numbers]
            found = self.store.get(self.namespace, keys, self.buffers[: len(keys)])
            digests = [xxhash.xxh3_128_digest(x) for x in self.buffers[: len(keys)]]
            if not all(found) or digests != [self._expected[i] for i in numbers]:
                return False
        return True

    def read_with_dd(self, num_bytes: int = 1 << 20) -> float:
        """Read all files with dd and a buffer of so many bytes. Returns bytes a second."""
        flags = ["of=/dev/null", f"bs={num_bytes}"]
        commands = [["dd", f"if={file}", *flags] for file in self.files]
        start = time.perf_counter()
        for command in commands:
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        return sum(file.stat().st_size for file in self.files) / seconds

    def drop(self) -> None:
        """Drop the files from the page cache.

        Raises:
            SystemExit: some of them stays there.
        """
        for file in self.files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if (left := _cached(file)) > 0.01:
                raise SystemExit(f"{file}: {left:.0%} stays in the page cache, expected nothing")


def _cached(file: Path) -> float:
    """The share of a file that is in the page cache."""
    size = file.stat().st_size
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped,
    ):
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        pointer = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(pointer)
        del pointer  # The map cannot be closed with it; its address stays until then.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(x & 1 for x in found) / len(found)


def _measure(pages: Pages, rounds: int) -> list[dict[str, Any]]:
    large = len(pages.buffers) * pages.namespace.page_bytes
    reads: dict[str, Callable[[], float]] = {
        "get": pages.read,
        "dd": pages.read_with_dd,
        "dd large": lambda: pages.read_with_dd(large),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in sorted(reads, reverse=bool(number % 2)):
            pages.drop()
            for case in ("cold", "warm"):
                found.setdefault(case, {}).setdefault(name, []).append(reads[name]())
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    gate = "passed" if pages.is_right() else "failed"
    return [
        {
            "name": case,
            "gate": gate,
            "bytes_per_second": rates,
            "ratio": statistics.median(
                get / dd for get, dd in zip(rates["get"], rates["dd"], strict=True)
            ),
        }
        for case, rates in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="storage_speed", description="Read pages beside dd")
    add = parser.add_argument
    add("out", type=Path, help="JSON file to write")
    add("--folder", type=Path, help="where to make the store; default: the folder of OUT")
    add("--bytes", type=int, default=1 << 30, help="of all pages")
    add("--page-bytes", type=int, default=368_640, help="default: SmolLM2-135M, 16 tokens, bf16")
    add("--parts", type=int, default=1, help="of a page")
    add("--batch", type=int, default=64, help="pages of a call")
    add("--threads", type=int, default=2, help="of a call")
    add("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    folder = arguments.folder or arguments.out.absolute().parent
    with tempfile.TemporaryDirectory(dir=folder) as made:
        pages = Pages(arguments, Path(made))
        with pages.store:
            cases = _measure(pages, arguments.rounds)
    settings = vars(arguments).copy()
    del settings["out"], settings["folder"]
    result = {
        "command": "storage_speed",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "settings": settings,
        "cases": cases,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for case in cases:
        rates = {name: statistics.median(x) for name, x in case["bytes_per_second"].items()}
        shown = ", ".join(f"{name} {format_bytes(int(x))}/s" for name, x in rates.items())
        print(f"{case['name']}: {shown}; get/dd {case['ratio']:.2f}; bytes {case['gate']}")
    return int(any(x["gate"] != "passed" or x["ratio"] < _LIMIT for x in cases))


if __name__ == "__main__":
    sys.exit(main())
