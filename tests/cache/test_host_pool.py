"""The host pool's memory: huge pages if the kernel has them, and no page touched at start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hisparse.cache import HostKVPool
from tests.shapes import small_spec

MADVISE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def resident_kb(field: str) -> int:
    """Resident memory of this process in KiB, from the kernel."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1])


def pool(num_pages: int) -> HostKVPool:
    heads = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "v_head_dim": 64}
    kv = small_spec(num_layers=1, page_size=16, **heads)
    return HostKVPool(kv, num_pages, "page_head", pin=False)


def test_memory_is_taken_as_it_is_touched() -> None:
    before = resident_kb("Rss")
    made = pool(40_000)
    assert made.num_bytes == 40_000 * 16 * 128 * 4
    assert resident_kb("Rss") - before < 20_000
    assert made.layer(0).k[39_999].eq(0).all()


@pytest.mark.skipif(
    not MADVISE.exists() or "[never]" in MADVISE.read_text(), reason="no huge pages in this kernel"
)
def test_touched_memory_is_in_huge_pages() -> None:
    """Without them, reads of scattered pages are slower."""
    before = resident_kb("AnonHugePages")
    made = pool(20_000)
    for pages in made.layer(0):
        pages.fill_(1.0)
    assert resident_kb("AnonHugePages") - before > made.num_bytes // 1024 // 2
