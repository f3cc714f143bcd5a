"""Which decode steps can be captured, the cost of captured steps, and faults of the recorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from hisparse.algorithms import DecodeStep, build_algorithm
from hisparse.algorithms.quest import Quest
from hisparse.config import EXTENSIONS, HiSparseConfig
from hisparse.engine.batches import DecodeBatch
from hisparse.engine.extensions.base import Extension
from hisparse.errors import HiSparseError
from hisparse.testing import Request, Simulator, Violation
from hisparse.testing.operations import Operations, no_sync
from hisparse.testing.recording import ReplayingSimulator
from hisparse.types import Selection


class Faulty(Quest):
    """Quest with additional work before each selection."""

    fault: Callable[[DecodeStep], Any]

    def retrieve_topk(self, queries: torch.Tensor, layer_id: int, step: DecodeStep) -> Selection:
        found = type(self).fault(step)
        return super().retrieve_topk(queries if found is None else found * queries, layer_id, step)


def faulty(fault: Callable[[DecodeStep], Any]) -> Quest:
    return type("Planted", (Faulty,), {"fault": staticmethod(fault)})()


def host_values(step: DecodeStep) -> torch.Tensor:
    return torch.from_numpy(np.ones(len(step.slots), np.float32))[:, None, None]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(lambda step: step.num_pages[0] > 3 and None, "branch", id="branch-on-a-value"),
        pytest.param(host_values, "host values", id="from-numpy"),
        pytest.param(
            lambda step: torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None],
            "(host|Python) values",
            id="constant",
        ),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(
    fault: Callable[[DecodeStep], Any], message: str
) -> None:
    with pytest.raises(Violation, match=message):
        ReplayingSimulator(algorithm=faulty(fault))


@dataclass(frozen=True)
class NoOptions:
    """The readers have none."""


class LayerReader(Extension):
    """Keeps the selection that the layer before had."""

    options_type = NoOptions

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.lengths: list[torch.Tensor] = []

    def before_layer(self, layer_id: int, step: DecodeStep) -> None:
        if layer_id:
            assert step.cache.selection is not None
            self.lengths.append(step.cache.selection.lengths.clone())


class AttentionReader(LayerReader):
    """Sees the selection in the other hook."""

    def before_layer(self, layer_id: int, step: DecodeStep) -> None:
        """Nothing."""

    def after_attention(self, layer_id: int, queries: Any, selection: Any, *rest: Any) -> Any:
        self.lengths.append(selection.lengths.clone())
        return rest[-1]


@pytest.mark.parametrize("reader", [LayerReader, AttentionReader])
def test_an_extension_sees_what_dense_requests_attend(
    reader: type[LayerReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a captured step too, whichever of the hooks it overrides."""
    monkeypatch.setattr(EXTENSIONS, "_entries", EXTENSIONS._entries | {"reader": reader})
    sim = ReplayingSimulator(extensions={"reader": True}, min_sparse_context=120, max_row=96)
    monkeypatch.setattr(sim.recording, "replay", sim.run)
    request = sim.request(1, 190, seed=1)
    sim.prefill((request, 80))
    found: Any = next(iter(sim.coordinator.extensions.values()))
    found.lengths.clear()
    sim.decode(request)
    assert found.lengths
    for lengths in found.lengths:
        assert lengths[0].tolist() == [80 // sim.page_size] * sim.policy.heads


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"checked": True}, "checked is true"),
    ],
)
def test_what_cannot_be_captured_says_why(settings: dict[str, Any], reason: str) -> None:
    sim = Simulator(**settings)
    request = sim.request(1, 60, seed=0)
    sim.prefill((request, 50))
    assert not sim.next_tokens(request).begin_replay(sim.coordinator)
    batch = ReplayingSimulator().static.first(2)
    with pytest.raises(HiSparseError, match=f"cannot be captured: .*{reason}"):
        sim.coordinator.forward_begin(batch)


def test_rows_that_shrink_and_grow_between_replays() -> None:
    outs = []
    for kind in (Simulator, ReplayingSimulator):
        sim = kind(device_pages=48, device_buffer=48, max_row=192, checked=False)
        one = sim.request(2, 190, seed=6)
        sim.prefill((one, 100))
        found, capacities, others = [], set(), []
        for step in range(50):
            if step % 12 == 5:
                others = [sim.request([1, 3, 4][step // 12 % 3], 190, seed=step)]
                sim.prefill((others[0], 90 + step))
            found.append(sim.decode(*others, one)[:, -1])
            capacities.add(sim.manager.residency.capacities.held[2])
            if step % 12 == 11:
                sim.end(others.pop())
        outs.append(torch.stack(found))
    assert len(capacities) > 2
    assert torch.equal(*outs)


class Sized(ReplayingSimulator):
    """Rows for a large batch."""

    batch_size = 64
    num_pages = 8

    def __init__(self, batch_size: int, host_pages: int = 700) -> None:
        self.batch_size = batch_size
        super().__init__(num_slots=65, host_pages=host_pages, max_row=64)


class Calls(TorchFunctionMode):
    """Counts the PyTorch calls of Python that do something.

    One request has other strides than 64: whoever asks for them asks once a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in ("is_contiguous", "stride"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def warm(size: int) -> tuple[Sized, list[Request]]:
    """So many requests, some steps decoded; the next one fills a page."""
    sim = Sized(size)
    requests = [sim.request(slot + 1, 64, seed=slot) for slot in range(size)]
    for request in requests:
        sim.prefill((request, 41))
    for _ in range(6):
        sim.decode(*requests)
    return sim, requests


def run(sim: Sized, batch: DecodeBatch) -> list[str]:
    """PyTorch calls of a step with arbitrary K, V and queries."""
    count = len(batch.slots)
    with Calls() as seen:
        sim.coordinator.forward_begin(batch)
        for layer in range(sim.layers):
            sim.coordinator.attention(layer, *(x[layer, :count] for x in sim.streams[:3]))
        sim.coordinator.forward_end()
    return seen.names


def test_a_step_costs_python_the_same_for_1_request_and_for_64() -> None:
    """For a captured step, the work before a replay, and an eager step: no loop over requests."""
    captured, before, eager = [], [], []
    for size in (1, 64):
        sim, requests = warm(size)
        batch = sim.next_tokens(*requests)
        with Operations() as seen, no_sync("what runs before a replay"):
            assert batch.begin_replay(sim.coordinator)
            sim.static.load(batch)
        before.append(seen)
        # The first step of a shape checks its tensors; later ones know that they pass.
        run(sim, sim.static.first(size))
        captured.append(run(sim, sim.static.first(size)))
        run(sim, sim.next_tokens(*requests))
        batch = sim.next_tokens(*requests)
        with no_sync("an eager step"):
            eager.append(run(sim, batch))
    assert captured[0] == captured[1]
    assert eager[0] == eager[1]
    assert before[0].names == before[1].names
    # Numbers that are filled in; no tensor of the size of a batch.
    assert before[1].num_bytes == before[0].num_bytes <= 64


def allocated(context: int) -> int:
    """Bytes of new tensors in a layer of an eager step of 4 requests; no tail page fills."""
    sim = Simulator(checked=False, host_pages=700)
    requests = [sim.request(slot, context + 2, seed=slot) for slot in (1, 2, 3, 4)]
    for request in requests:
        sim.prefill((request, context))
    batch = sim.next_tokens(*requests)
    sim.coordinator.forward_begin(batch)
    tokens = (torch.stack([getattr(r, name)[0, context] for r in requests]) for name in "qkv")
    with Operations() as seen:
        sim.coordinator.attention(0, *tokens)
    return seen.num_bytes


def test_what_an_eager_step_allocates_grows_by_its_scores_and_little_else() -> None:
    """Allocations grow with the context by the scores, one per page and head, without copies."""
    more_pages = 64
    scores = 4 * more_pages * Simulator.q_heads * torch.float32.itemsize
    grown = allocated(161 + more_pages * 8) - allocated(161)
    assert scores < grown <= 2 * scores


def layers_of(
    sim: Simulator, requests: list[Request], each: Callable[[torch.Tensor], object]
) -> list[int]:
    """Bytes of new tensors in each layer of an eager step, whose outputs ``each`` gets."""
    sim.coordinator.forward_begin(sim.next_tokens(*requests))
    allocated = []
    for layer in range(sim.layers):
        last = [(r, r.done - 1) for r in requests]
        tokens = [torch.stack([getattr(r, x)[layer, i] for r, i in last]) for x in "qkv"]
        sinks = None if sim.sinks is None else sim.sinks[layer]
        with Operations() as seen:
            out = sim.coordinator.attention(layer, *tokens, sinks=sinks)
        each(out)
        del out
        allocated.append(seen.num_bytes)
    sim.coordinator.forward_end()
    return allocated


@pytest.mark.parametrize("name", ["sketch", "quest", "snapkv", "streaming", "oracle", "dipr"])
@pytest.mark.parametrize("scope", ["layer", "kv_head", "query_head"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_after_the_first_allocate_nothing(
    name: str, scope: Any, kv_cache_dtype: str, dtype: torch.dtype
) -> None:
    """In eager steps, of which some fill a tail page.

    Recorded layers of ``dipr`` keep what they select, to count what the cap cut short.
    """
    sim = Simulator(
        checked=False,
        layers=4,
        scope=scope,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        algorithm=build_algorithm(HiSparseConfig(algorithm=name)),
    )
    requests = [sim.request(slot, 180, seed=slot) for slot in (1, 2)]
    sim.prefill((requests[0], 161), (requests[1], 130))
    kept = len(requests) * sim.policy.heads * (1 + sim.policy.max_pages) * torch.int32.itemsize
    for _ in range(sim.page_size):
        first, *others = layers_of(sim, requests, lambda out: None)
        assert first > 0
        if name == "dipr" and sim.coordinator.decode._recorded._calls and kept:
            assert max(others) <= kept
            kept = 0
        else:
            assert others == [0, 0, 0], f"{[x.done for x in requests]} tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sinks", [None, torch.zeros(4, 4, dtype=torch.bfloat16)], ids=["", "sinks"]
)
@pytest.mark.parametrize("dense", [0, 140, 1000], ids=["sparse", "mixed", "dense"])
def test_nor_do_dense_contexts_and_sinks(
    dense: int, sinks: torch.Tensor | None, dtype: torch.dtype
) -> None:
    rows = {"device_buffer": 256, "max_row": 256}
    sim = Simulator(
        checked=False, layers=4, dtype=dtype, min_sparse_context=dense, sinks=sinks, **rows
    )
    requests = [sim.request(slot, 180, seed=slot) for slot in (1, 2)]
    sim.prefill((requests[0], 161), (requests[1], 120))
    for _ in range(sim.page_size):
        _, *others = layers_of(sim, requests, lambda out: None)
        assert others == [0, 0, 0], f"{[x.done for x in requests]} tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_of_a_layer_does_not_change(dtype: torch.dtype) -> None:
    """Later layers take memory that no tensor refers to: not that of a view that is kept."""
    sim = Simulator(checked=False, layers=3, dtype=dtype)
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def keep(*values: torch.Tensor) -> None:
        kept.extend(values)
        copies.extend(x.clone() for x in values)

    sim.coordinator.observe(lambda layer, q, step, found: keep(found.pages[:, 1:], found.lengths))
    requests = [sim.request(slot, 180, seed=slot) for slot in (1, 2)]
    sim.prefill((requests[0], 161), (requests[1], 90))
    for _ in range(3):
        layers_of(
            sim, requests, lambda out: keep(torch.from_numpy(out.view(torch.uint8).numpy())[1])
        )
    assert len(kept) == 3 * 3 * 3
    assert all(map(torch.equal, kept, copies))
    assert len({str(x.tolist()) for x in copies[::3]}) > 1, "layers select differently"


def test_a_captured_step_is_as_many_operations_for_2_requests_as_for_64() -> None:
    two, many = (Sized(size).recording.names for size in (2, 64))
    assert two == many


def test_what_a_capture_keeps_does_not_grow_with_the_pool() -> None:
    small, large = (Sized(4, pages).recording.num_bytes for pages in (100, 700))
    assert small == large > 0
