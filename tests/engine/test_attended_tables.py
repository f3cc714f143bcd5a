"""The page tables of decode steps stay within the limits that sizing states to the adapter."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hisparse.adapters import Attended, TableLimits, TorchAdapter
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.quest import Quest
from hisparse.memory.costs import attended_tables
from hisparse.testing import Simulator
from hisparse.types import AttentionRule, PagedKV

#: What is asked of an adapter: ``R, P, Q, Hr, S``.
_Call = tuple[int, ...]


class Watched(TorchAdapter):
    """Records the shapes of its calls."""

    def __init__(self) -> None:
        self.calls: set[_Call] = set()

    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        self.calls.add((*page_table.shape, q.shape[1], *kv.k.shape[1:3]))
        return super().attend(q, kv, page_table, seq_lens, rule)


def holds(table: TableLimits, call: _Call) -> bool:
    rows, pages, *shape = call
    fits = table.min_rows <= rows <= table.max_rows and pages <= table.max_pages
    return fits and tuple(shape) == (table.num_queries, table.num_heads, table.page_size)


@pytest.mark.parametrize("scope", ["layer", "kv_head", "query_head"])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        pytest.param(Quest(), {}, id="sparse"),
        pytest.param(DIPR(), {}, id="variable-lengths"),
        pytest.param(Oracle(), {}, id="a-tail-that-is-ranked"),
        pytest.param(Quest(), {"min_sparse_context": 100}, id="dense-contexts"),
        pytest.param(Quest(), {"min_sparse_context": 60, "max_row": 64}, id="dense-in-their-rows"),
        pytest.param(Quest(), {"dense_layers": (1,)}, id="dense-layers"),
        pytest.param(Quest(), {"dense_layers": (1,), "max_row": 64}, id="staged"),
        pytest.param(Quest(), {"extensions": {"tail_estimate": True}}, id="tail-estimate"),
    ],
)
def test_no_call_is_beyond_what_is_charged(
    algorithm: BaseSparseAlgorithm, settings: dict[str, Any], scope: str
) -> None:
    adapter = Watched()
    sim = Simulator(
        adapter=adapter, algorithm=algorithm, scope=scope, checked=False, num_slots=4, **settings
    )
    requests = [sim.request(slot, 170, seed=slot) for slot in (1, 2, 3)]
    for request, prompt in zip(requests, (5, 90, 101), strict=True):
        sim.prefill((request, prompt))
    for step in range(60):
        sim.decode(*requests[: step % 3 + 1])
    limits = {"max_requests": 3, "context_pages": -(-170 // sim.page_size)}
    tables = attended_tables(
        sim.resolved,
        sim.policy,
        max_requests=3,
        max_row_pages=sim.max_row // sim.page_size,
        tile_pages=sim.staging_pages,
    )
    for extension in sim.coordinator.extensions.values():
        tables += extension.attended_tables(sim.policy, **limits)
    assert adapter.calls
    for call in adapter.calls:
        assert any(holds(table, call) for table in tables), f"{call} is not in {tables}"
    # Nor is more charged: some step attends over the widest table.
    device = tables[0]
    assert device.max_pages == max(call[1] for call in adapter.calls if holds(device, call))
