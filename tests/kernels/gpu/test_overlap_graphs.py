"""Overlap on the streams of a GPU, eager and captured, with side work that is slow: no wait is
missing if nothing changes. On a CPU the work is delayed instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from test_step_graphs import BATCH, CONTEXT, HEADS, LAYERS, ON_GPU, SIZE, Captured, make_world
from torch import Tensor

from hisparse.cache import manager
from hisparse.cache.streams import CudaStreams, Lane, Pending, SideStreams
from hisparse.engine.batches import PrefillBatch
from hisparse.engine.prefill import PrefillChunk
from hisparse_bench.random_requests import RandomRequests
from tests.delayed import DelayedStreams

T = TypeVar("T")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
#: About a millisecond: longer than a layer of these tests.
_CYCLES = 2_000_000


class SlowStreams(CudaStreams):
    """Each work of a side stream begins late."""

    def start(self, lane: Lane, work: Callable[[], T]) -> Pending[T]:
        def late() -> T:
            torch.cuda._sleep(_CYCLES)
            return work()

        return super().start(lane, late)


@pytest.fixture(autouse=True)
def slow_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(device: torch.device) -> SideStreams:
        return SlowStreams(device) if device.type == "cuda" else DelayedStreams("late")

    monkeypatch.setattr(manager, "make_streams", make)


def new_tokens(world: RandomRequests, count: int) -> list[Tensor]:
    kv = world.kv
    shapes = [(LAYERS, count, heads, kv.head_dim) for heads in (2 * HEADS, HEADS, HEADS)]
    return [torch.randn(shape, device=world.device).to(kv.dtype) for shape in shapes]


def step(world: RandomRequests, tokens: list[Tensor]) -> Tensor:
    world.begin_token()
    outs = [world.coordinator.attention(i, *(x[i] for x in tokens)) for i in range(LAYERS)]
    world.coordinator.forward_end()
    return torch.stack(outs)


@DEVICES
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_steps_in_order_on_side_streams(scope: str, device: str) -> None:
    """Eager and captured, bit for bit; captured steps have side work without overlap, too."""
    plain = make_world(device, scope, reuse_layers=2)
    world = make_world(device, scope, reuse_layers=2, overlap=True)
    captured = [
        Captured(make_world(device, scope, reuse_layers=2, overlap=overlap))
        for overlap in (False, True)
    ]
    for _ in range(2 * SIZE + 3):
        tokens = new_tokens(plain, BATCH)
        expected = step(plain, tokens)
        assert torch.equal(step(world, tokens), expected)
        for each in captured:
            assert torch.equal(each.step(tokens), expected)
    assert plain.stats == world.stats
    assert plain.stats.miss_pages > 0


@DEVICES
def test_a_chunk_over_a_prefix_of_many_tiles(device: str) -> None:
    worlds = [make_world(device, "kv_head", overlap=overlap) for overlap in (False, True)]
    length = 2 * SIZE + 3
    for _ in range(3):
        tokens = new_tokens(worlds[0], length)
        outs = [prefill(world, tokens, length) for world in worlds]
        assert torch.equal(*outs)
    for layer in range(LAYERS):
        for one, other in zip(*(world.host.layer(layer) for world in worlds), strict=True):
            assert torch.equal(one, other)


def prefill(world: RandomRequests, tokens: list[Tensor], length: int) -> Tensor:
    position = torch.arange(CONTEXT, CONTEXT + length, device=world.device)
    pages = world.table[0, : -(-(CONTEXT + length) // SIZE)]
    host_slots = pages[position // SIZE].long() * SIZE + position % SIZE
    chunk = PrefillChunk(slot=1, start=CONTEXT, length=length, offset=0, host_pages=pages)
    world.coordinator.on_request_begin(1)
    world.coordinator.forward_begin(PrefillBatch(chunks=[chunk], host_slots=host_slots))
    outs = [world.coordinator.attention(i, *(x[i] for x in tokens)) for i in range(LAYERS)]
    world.coordinator.forward_end()
    return torch.stack(outs)
