"""Memory that several ranks map; here each rank is a thread."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from hisparse.cache import HostKVPool
from hisparse.cache.allocate import NodeRanks, map_together, zeros
from hisparse.errors import CapacityError
from hisparse.types import KVSpec
from tests.processes import as_nobody, needs_root

SIZE = 3
CPU = torch.device("cpu")
T = TypeVar("T")


def on_all_ranks(work: Callable[[NodeRanks], T]) -> list[T | Exception]:
    """What ``work`` returns or raises on each rank."""
    texts, barrier = [""] * SIZE, Barrier(SIZE, timeout=60)

    def run(rank: int) -> T | Exception:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait()
            gathered = list(texts)
            barrier.wait()
            return gathered

        try:
            return work(NodeRanks(rank=rank, size=SIZE, gather=gather))
        except CapacityError as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(run, range(SIZE)))


def memory_files() -> list[str]:
    """Files in memory that this process has open or mapped."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [name for name in (*links, *mapped) if "memfd:hisparse" in name]


def test_ranks_map_the_same_memory_and_leave_nothing() -> None:
    memories = on_all_ranks(lambda ranks: zeros([5000], torch.int32, CPU, ranks=ranks))
    for rank, memory in enumerate(memories):
        assert isinstance(memory, Tensor)
        assert memory.count_nonzero() == rank
        memory[rank] = rank + 1
    assert all(memory[:3].tolist() == [1, 2, 3] for memory in memories)
    assert len({memory.data_ptr() for memory in memories}) == SIZE
    del memories, memory
    gc.collect()
    assert not memory_files()


def test_an_mla_pool_is_shared_and_others_are_not() -> None:
    def pools(kv: KVSpec) -> list[HostKVPool]:
        return on_all_ranks(lambda ranks: HostKVPool(kv, 5, "page_first", pin=False, ranks=ranks))

    shapes = {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 1, "head_dim": 24}
    shapes |= {"v_head_dim": 16, "dtype": torch.float32, "page_size": 4}
    for latent in (True, False):
        found = pools(KVSpec(**shapes, attention="MLA" if latent else "GQA"))
        found[0].layer(1).k[3] = 7
        assert [bool((pool.layer(1).k[3] == 7).all()) for pool in found[1:]] == [latent] * 2
        parts = [pool.num_bytes // pool.rank_bytes for pool in found]
        assert parts == [SIZE if latent else 1] * SIZE


@pytest.mark.parametrize("where", ["first", "last"])
def test_if_one_rank_fails_all_say_so(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """None waits for another one, and each message names the rank that failed."""
    failing = {"first": "memfd_create", "last": "open"}[where]

    def fail(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, failing, fail)
    errors = on_all_ranks(lambda ranks: zeros([5000], torch.int32, CPU, ranks=ranks))
    rank = {"first": 0, "last": 1}[where]
    for error in errors:
        assert isinstance(error, CapacityError)
        assert "host memory: 19.53 KiB were refused (OSError: " in str(error)
        assert f"rank {rank}: OSError: [Errno 12] Cannot allocate memory" in str(error)
    del errors, error
    gc.collect()
    assert not memory_files()


def test_ranks_that_want_different_sizes_are_refused() -> None:
    """A rank that maps more than there is would end at its first access."""
    errors = on_all_ranks(
        lambda ranks: zeros([5000 * (1 + ranks.rank)], torch.uint8, CPU, ranks=ranks)
    )
    assert all("rank 1: ValueError: mmap length is greater than" in str(e) for e in errors)


@needs_root
def test_another_user_cannot_open_the_memory() -> None:
    """Though no folder keeps him away: the system asks who may look into the process."""
    offered: list[str] = []

    def gather(text: str) -> list[str]:
        offered.append(text)
        return [text]

    answer = map_together(
        4096,
        NodeRanks(rank=0, size=1, gather=gather),
        lambda fd: as_nobody(lambda: os.open(offered[0], os.O_RDWR)),
    )
    assert answer.startswith("PermissionError: [Errno 13] Permission denied: '/proc/")
