"""CUDA graphs: a captured step of kernels replays to what it gives eagerly, bit for bit.

On a CPU the operations are recorded, which shows that this test has something to capture.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hisparse.kernels import (
    DecodeRows,
    SelectRule,
    diff_tables,
    gather_pages,
    page_score,
    paged_attention,
    select,
)
from hisparse.testing.recording import record
from hisparse.types import PagedKV, Selection
from tests.kernels.world import empty_state

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")

ROWS, PAGES, SIZE, WIDTH, DIM, SLOTS = 4, 64, 16, 12, 64, 24


class Step:
    """Score, select, find what is missing, bring it in, attend: in static tensors."""

    def __init__(self, device: str = "cuda") -> None:
        torch.manual_seed(0)
        host = torch.randn(2, PAGES, ROWS, SIZE, DIM)
        self.host = PagedKV(*(host.pin_memory() if device == "cuda" else host))
        shape = (ROWS * SLOTS, 1, SIZE, DIM)
        self.device = PagedKV(*(torch.zeros(shape, device=device) for _ in range(2)))
        slots = torch.arange(SLOTS, dtype=torch.int32, device=device).repeat(ROWS, 1)
        pages = torch.arange(ROWS * SLOTS, dtype=torch.int32, device=device).view(ROWS, SLOTS)
        self.state = empty_state(slots, pages, PAGES)
        self.capacity = torch.full((ROWS,), SLOTS, dtype=torch.int32, device=device)
        self.real = torch.ones(1, dtype=torch.int32, device=device) * ROWS
        self.rows = torch.arange(ROWS, device=device)
        self.tails = torch.zeros_like(self.capacity)  # Not attended: `lengths` counts full pages.
        self.query = torch.randn(1, ROWS, DIM, device=device)
        self.summaries = torch.randn(PAGES, ROWS, 2 * DIM, device=device)
        self.table = torch.randperm(PAGES).int().to(device)[None]
        self.num_pages = torch.full((1,), PAGES, dtype=torch.int32, device=device)
        self.forced = torch.arange(PAGES, device=device)[None] >= PAGES - 2

    def run(self) -> tuple[Tensor, Tensor]:
        scores = page_score(self.query, self.summaries[:, None], self.table, self.num_pages)
        rule = SelectRule(heads=ROWS, max_pages=WIDTH)
        chosen = select(scores, self.num_pages, rule, forced=self.forced)
        own = (self.rows, self.capacity, self.real, self.table, self.num_pages)
        rows = DecodeRows(*own, self.tails, self.tails)
        selection = Selection(chosen.pages[0], chosen.lengths[0])
        tables = diff_tables(selection, rows, self.state, page_size=SIZE)
        loads = (tables.load_host_pages, self.device, tables.loads)
        gather_pages(self.host, *loads, heads=ROWS)
        return paged_attention(
            self.query[0, :, None], self.device, tables.attended, tables.seq_lens
        )


def capture(step: Step, device: str) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
    """The outputs of a captured run, and what replays it."""
    if device == "cpu":
        with record("a step of kernels") as recording:
            outs = step.run()
        return outs, recording.replay
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step.run()
    return outs, graph.replay


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_captured_step_replays_bitwise(device: str) -> None:
    eager, captured = Step(device), Step(device)
    captured.run()  # Compiles.
    (out, lse), replay = capture(captured, device)
    # Back to the state before: a recording on a CPU runs the step as well.
    for mine, fresh in zip(captured.state, eager.state, strict=True):
        mine.copy_(fresh)
    for seed in range(20):
        torch.manual_seed(seed)
        query = torch.randn(1, ROWS, DIM)
        eager.query.copy_(query)
        captured.query.copy_(query)
        expected, expected_lse = eager.run()
        replay()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        held = zip(captured.state, eager.state, strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in held)
    assert_resident(captured)


def assert_resident(step: Step) -> None:
    """Invariant 2: resident bytes are the host's."""
    for row, pages in enumerate(step.state.slot_pages.tolist()):
        for slot, page in enumerate(pages):
            if page >= 0:
                source, at = step.table[0, page], step.state.device_pages[row, slot]
                assert torch.equal(step.device.k[at, 0].cpu(), step.host.k[source.cpu(), row])


@ON_GPU
def test_unpinned_host_memory_is_refused() -> None:
    from hisparse.errors import KernelError

    step = Step()
    unpinned = PagedKV(*(x.clone() for x in step.host))
    index = torch.zeros((ROWS, 1), dtype=torch.int32, device="cuda")
    with pytest.raises(KernelError, match="pinned"):
        gather_pages(unpinned, index, step.device, index, heads=ROWS)
