"""How often a decode layer enters the cache manager, and looks up page tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hisparse.cache import swap_in
from hisparse.cache.kv_io import KVReadWrite
from hisparse.testing import Simulator


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, counts: Counter[str]) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("scope", ["layer", "kv_head", "query_head"])
def test_a_decode_layer_enters_three_times(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append, swap in, promote; the last one only in a step that fills a tail page."""
    counts: Counter[str] = Counter()
    for owner, name in (
        (KVReadWrite, "append"),
        (swap_in.SwapIn, "swap_in"),
        (KVReadWrite, "promote_tails"),
    ):
        count(monkeypatch, owner, name, counts)
    sim = Simulator(scope=scope, layers=3)
    request = sim.request(1, 160, seed=1)
    sim.prefill((request, 8 * sim.page_size - 2))
    for name in ("diff_tables", "move_pages"):
        count(monkeypatch, swap_in, name, counts)
    once = dict.fromkeys(("append", "swap_in", "diff_tables", "move_pages"), 3)
    counts.clear()
    sim.decode(request)
    assert counts == once
    counts.clear()
    sim.decode(request)
    assert counts == once | {"promote_tails": 3}
