"""Pages of tests: a key says what is in the page."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hisparse.storage import FileStore, Namespace

#: A page is neither a whole number of blocks nor of words.
NAMESPACE = Namespace(
    model="tiny", kv_dtype="bfloat16", page_size=16, rank=0, num_ranks=1, page_bytes=5003
)
#: Bytes that it takes on the disk.
DISK_BYTES = 2 * 4096


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def contents(key: str, namespace: Namespace = NAMESPACE) -> bytes:
    """The bytes of a page, which depend on its key."""
    rng = np.random.default_rng(int(key[:15], 16))
    return rng.bytes(namespace.page_bytes)


def fill(store: FileStore, numbers: Sequence[int], namespace: Namespace = NAMESPACE) -> list[str]:
    """Put pages that must be taken. Returns their keys."""
    keys = [key_of(number) for number in numbers]
    for key in keys:
        assert store.put(namespace, key, contents(key, namespace))
    return keys


def read(store: FileStore, keys: Sequence[str], namespace: Namespace = NAMESPACE) -> list[bool]:
    """Which pages the store has; each must have its own bytes, all of them."""
    expected = [contents(key, namespace) for key in keys]
    buffers = [bytearray(len(data)) for data in expected]
    found = [ok is True for ok in store.get(namespace, keys, buffers)]
    for key, data, buffer, ok in zip(keys, expected, buffers, found, strict=True):
        assert not ok or bytes(buffer) == data, f"wrong bytes for {key}"
    return found


def page_file(folder: Path, key: str, namespace: Namespace = NAMESPACE) -> Path:
    return folder / "pages" / namespace.key / key


def page_files(folder: Path) -> list[Path]:
    return sorted(x for x in folder.glob("pages/*/*") if not x.suffix)


def disk_bytes(folder: Path) -> int:
    """Bytes that all pages take."""
    sizes = []
    for file in page_files(folder):
        with contextlib.suppress(FileNotFoundError):  # An eviction deletes files.
            sizes.append(-(-file.stat().st_size // 4096) * 4096)
    return sum(sizes)


def let_age(folder: Path, keys: Sequence[str], seconds: float) -> None:
    """Let pages be unused for so many seconds more."""
    for key in keys:
        file = page_file(folder, key)
        at = file.stat().st_mtime_ns - int(seconds * 1e9)
        os.utime(file, ns=(at, at))
