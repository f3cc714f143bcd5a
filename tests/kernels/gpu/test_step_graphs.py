"""The coordinator's whole decode step, captured once and replayed: eager results, bit for bit.

On a CPU the operations are recorded, which shows that this test has something to capture. Side work
is late, so that no wait is missing if nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import pytest
import torch
from torch import Tensor

from hisparse.cache import manager
from hisparse.cache.streams import CudaStream, Pending, SideStream
from hisparse.engine.batches import StaticBatch
from hisparse.testing.recording import record
from hisparse.types import SelectionScope
from hisparse_bench.random_requests import RandomRequests
from tests.delayed import DelayedStream
from tests.shapes import small_spec

T = TypeVar("T")
Miss = Literal["transfer", "host"]
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
BATCH, PADDED, LAYERS, HEADS, DIM, SIZE = 3, 4, 2, 2, 64, 16
CONTEXT, ROOM = 40 * SIZE, 3 * SIZE
#: About a millisecond: longer than a layer of this test.
_CYCLES = 2_000_000


class SlowStream(CudaStream):
    """Each work begins late."""

    def start(self, work: Callable[[], T]) -> Pending[T]:
        def late() -> T:
            torch.cuda._sleep(_CYCLES)
            return work()

        return super().start(late)


def slow_stream(device: torch.device) -> SideStream:
    return SlowStream(device) if device.type == "cuda" else DelayedStream("late")


def make_world(device: str, scope: SelectionScope, miss: Miss = "transfer") -> RandomRequests:
    heads = {"num_q_heads": 2 * HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "v_head_dim": DIM}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kv = small_spec(num_layers=LAYERS, **heads, dtype=dtype, page_size=SIZE)
    return RandomRequests(
        kv=kv,
        batch=BATCH,
        context=CONTEXT,
        budget=10 * SIZE,
        row_tokens=16 * SIZE,
        max_new_tokens=ROOM,
        device=torch.device(device),
        scope=scope,
        miss=miss,
    )


def run_eagerly(world: RandomRequests, tokens: list[Tensor]) -> Tensor:
    world.begin_token()
    outs = [world.coordinator.attention(i, *(x[i] for x in tokens)) for i in range(LAYERS)]
    world.coordinator.forward_end()
    return torch.stack(outs)


class Captured:
    """A step of ``PADDED`` rows whose last one is padding."""

    def __init__(self, world: RandomRequests) -> None:
        self._world, kv = world, world.kv
        pages = (CONTEXT + ROOM) // SIZE
        self._batch = StaticBatch(PADDED, pages, SIZE, world.device)
        self._tokens = [
            torch.zeros(LAYERS, PADDED, heads, DIM, dtype=kv.dtype, device=world.device)
            for heads in (kv.num_q_heads, kv.num_kv_heads, kv.num_kv_heads)
        ]
        self._run()
        self._out, self._replay = self._capture()

    def _capture(self) -> tuple[Tensor, Callable[[], None]]:
        if self._world.device.type == "cpu":
            with record("a decode step") as recording:
                out = self._run()
            return out, recording.replay
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._run()
        return out, graph.replay

    def _run(self) -> Tensor:
        coordinator = self._world.coordinator
        coordinator.forward_begin(self._batch.first(PADDED))
        outs = [coordinator.attention(layer, *(x[layer] for x in self._tokens)) for layer in (0, 1)]
        coordinator.forward_end()
        return torch.stack(outs)

    def step(self, tokens: list[Tensor]) -> Tensor:
        batch = self._world.next_batch()
        assert batch.begin_replay(self._world.coordinator)
        self._batch.load(batch)
        for kept, new in zip(self._tokens, tokens, strict=True):
            kept[:, :BATCH] = new
        self._replay()
        return self._out[:, :BATCH]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("miss", ["transfer", "host"])
@pytest.mark.parametrize("scope", ["layer", "kv_head", "query_head"])
def test_a_captured_step_replays_bitwise(
    scope: SelectionScope, miss: Miss, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "make_stream", slow_stream)
    eager, other = make_world(device, scope, miss), make_world(device, scope, miss)
    captured, waiting = Captured(other), make_world(device, scope)
    for _ in range(2 * SIZE + 3):
        tokens = [
            torch.randn(LAYERS, BATCH, heads, DIM, device=device).to(eager.kv.dtype)
            for heads in (2 * HEADS, HEADS, HEADS)
        ]
        expected, loaded = run_eagerly(eager, tokens), run_eagerly(waiting, tokens)
        assert torch.equal(captured.step(tokens), expected)
        # The sums are those of other parts.
        within = (miss == "host") * (2e-2 if device == "cuda" else 1e-5)
        torch.testing.assert_close(expected, loaded, rtol=within, atol=within)
    rows = slice(eager.policy.heads, None)
    mine, theirs = other.coordinator.manager.device, eager.coordinator.manager.device
    for held, wanted in zip(mine.states[:3], theirs.states[:3], strict=True):
        assert torch.equal(held[:, rows], wanted[:, rows])
    assert other.stats == eager.stats
    assert eager.stats.miss_pages > 0
    assert eager.stats.away_pages == (miss == "host") * eager.stats.miss_pages
