"""LRU buffers of all sizes at once, against one buffer after the other."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor

from hisparse.eval.selection_stats import LruStacks


def hits_of_a_buffer(trace: list[list[int]], size: int) -> int:
    """Of steps after the first; a selection larger than the buffer makes it as large."""
    buffer: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for pages in trace:
        hits += sum(page in buffer for page in pages)
        for page in pages:
            buffer[page] = None
            buffer.move_to_end(page)
        while len(buffer) > max(size, len(pages)):
            buffer.popitem(last=False)
    return hits


def tensor(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor([[pages + [-1] * (width - len(pages))] for pages in rows])


@pytest.mark.parametrize("width", [1, 5, 12])
def test_depths_tell_the_hits_of_every_buffer(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    traces: list[list[list[int]]] = [[], []]
    sizes = (1, 2, 5, 9, 20)
    stacks, hits = LruStacks(max(sizes)), dict.fromkeys(sizes, 0)
    slots = torch.tensor([3, 0])
    for step in range(60):
        rows = []
        for trace in traces:
            count = int(torch.randint(0, width + 1, (), generator=generator))
            rows.append(sorted(torch.randperm(20, generator=generator)[:count].tolist()))
            trace.append(rows[-1])
        pages = tensor(rows, width)
        seq_lens = torch.tensor([100 + step, 300 + step])
        depths, before, known = stacks.visit(1, slots, seq_lens, pages)
        assert known.tolist() == [step > 0] * 2
        for size in sizes:
            held = (depths < before.clamp(min=size)[..., None]) & (pages >= 0)
            hits[size] += int(held.sum())
    assert hits == {size: sum(hits_of_a_buffer(t, size) for t in traces) for size in sizes}


def test_a_slot_of_another_request_begins_anew() -> None:
    stacks, slots = LruStacks(4), torch.tensor([0])
    pages = tensor([[1, 2]], 2)
    stacks.visit(0, slots, torch.tensor([10]), pages)
    depths, _, known = stacks.visit(0, slots, torch.tensor([11]), pages)
    assert known.all() and depths.max() < 4
    depths, before, known = stacks.visit(0, slots, torch.tensor([50]), pages)
    assert not known.any() and not before.any()
    assert depths.tolist() == [[[4, 4]]]
    _, _, known = stacks.visit(1, slots, torch.tensor([51]), pages)
    assert not known.any(), "another layer has its own order"


def test_a_slot_that_comes_later_starts_empty() -> None:
    """A batch may begin with lower request slots than the next one has."""
    stacks = LruStacks(4)
    pages = torch.tensor([[[3, 5]]])
    stacks.visit(0, torch.tensor([1]), torch.tensor([10]), pages)
    depths, _, known = stacks.visit(0, torch.tensor([4]), torch.tensor([7]), pages)
    assert (depths >= 4).all()
    assert not known.any()
    depths, _, known = stacks.visit(0, torch.tensor([1]), torch.tensor([11]), pages)
    assert (depths < 4).all()
    assert known.all()
