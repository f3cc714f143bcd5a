"""Decode steps that are recorded and replayed give what eager ones give, bit for bit.

A CUDA graph records a step; on a CPU a layer's kernel calls are recorded, if kernels alone compute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from hisparse.algorithms import ALGORITHMS, DecodeStep
from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.algorithms.snapkv import SnapKV
from hisparse.algorithms.streaming import Streaming
from hisparse.errors import AlgorithmError, HiSparseError, KernelError
from hisparse.kernels import select
from hisparse.kernels.build import cpu
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import ReplayingSimulator
from hisparse.types import Selection
from tests.delayed import DelayedStream, Order
from tests.sizes import crossed

SCOPES = ["layer", "kv_head", "query_head"]
ORDERS: list[Order] = ["early", "late", 1, 2]
REUSE = {"layers": 5, "reuse_layers": 2}
#: Rows without a spare page: what one load evicts, another one may need.
TIGHT = {"budget": 48, "device_buffer": 48, "max_row": 48}
TOKENS = {
    "page_size": 1,
    "host_pages": 1600,
    "num_sink_pages": 0,
    "num_recent_pages": 0,
    "staging_pages": 16,
}


def play(sim: Simulator) -> tuple[list[torch.Tensor], list[Request]]:
    """Requests of several lengths come and go, one of them from within the budget to beyond it."""
    long, middle = sim.request(1, 190, seed=1), sim.request(2, 190, seed=2)
    sim.prefill((long, 101), (middle, 59))
    outs = [sim.decode(long, middle) for _ in range(5)]
    short = sim.request(3, 60, seed=3)
    sim.prefill((short, 6))
    outs += [sim.decode(short, long, middle) for _ in range(20)]
    sim.end(long)
    outs += [sim.decode(middle, short) for _ in range(9)]
    long = sim.request(1, 190, seed=4)
    sim.prefill((long, 110))
    outs += [sim.decode(middle, long, short) for _ in range(17)]
    return outs, [short, middle, long]


def state_of(sim: Simulator) -> dict[str, torch.Tensor]:
    """The state after a step, without the pages and rows of the padding."""
    device, heads = sim.manager.device, sim.policy.heads
    found = {n: x for n, x in device.states._asdict().items() if x is not None}
    found |= {"capacity": device.capacity, "tail_pages": device.tail_pages}
    own = {name: x[heads:] if x.dim() == 1 else x[:, heads:] for name, x in found.items()}
    kept = sim.representations.tensors
    own |= {f"kept {name}": x.as_subclass(torch.Tensor)[:, 1:] for name, x in kept.items()}
    for layer in range(sim.layers):
        for name, pages in zip("kvs", sim.manager.host.stored(layer).tensors, strict=False):
            own[f"host {name} {layer}"] = pages[1:]
        # The tails of slot 0.
        for name, pages in zip("kvs", device.stored(layer).tensors, strict=False):
            own[f"device {name} {layer}"] = pages[heads:]
    return own


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), f"forward {number}: {(one - other).abs().max()}"


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        same = torch.equal(
            tensor.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)
        )
        assert same, name


SETTINGS = [
    pytest.param({}, id="sketch"),
    pytest.param({"algorithm": Sketch(economy=True)}, id="sketch-economy"),
    pytest.param({"algorithm": Quest()}, id="quest"),
    pytest.param({"algorithm": Quest(summary_dtype="bfloat16")}, id="quest-bfloat16"),
    pytest.param(
        {"kv_cache_dtype": "fp8_e4m3", "min_sparse_context": 80}, id="fp8-dense-beyond-the-budget"
    ),
    pytest.param({"algorithm": Streaming()}, id="streaming"),
    pytest.param({"algorithm": SnapKV(window=4)}, id="snapkv"),
    pytest.param({"algorithm": Oracle()}, id="oracle"),
    pytest.param({"algorithm": DIPR(alpha=0.5)}, id="dipr"),
    pytest.param({"min_sparse_context": 80}, id="dense-beyond-the-budget"),
    pytest.param({"dense_layers": (0,), "max_row": 192}, id="dense-layer"),
    pytest.param({"layers": 4, "reuse_layers": 2}, id="reuse"),
    pytest.param(
        {"extensions": {"tail_estimate": True}, "min_sparse_context": 80}, id="tail-estimate"
    ),
]


@crossed("scope, settings", SCOPES, SETTINGS)
def test_a_replayed_step_is_the_eager_one(scope: str, settings: dict[str, Any]) -> None:
    check(scope, settings)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"latent_rank": 8, "kv_heads": 1}, id="latent"),
        pytest.param(TOKENS, id="sketch-tokens"),
        pytest.param(TOKENS | {"algorithm": DSA()}, id="dsa"),
        pytest.param(TOKENS | {"algorithm": DSA(index_dtype="float32")}, id="dsa-float32"),
        pytest.param(
            TOKENS | {"algorithm": DSA(), "min_sparse_context": 80},
            id="dsa-dense-beyond-the-budget",
        ),
        pytest.param(
            TOKENS | {"algorithm": DSA(), "latent_rank": 8, "kv_heads": 1, "unindexed": (1,)},
            id="dsa-latent-shared",
        ),
    ],
)
def test_a_replayed_step_of_one_selection_for_all_heads(settings: dict[str, Any]) -> None:
    check("layer", settings)


@crossed("scope, order", SCOPES, ORDERS)
def test_full_tail_pages_are_served_beside_the_next_layers(scope: str, order: Order) -> None:
    check(scope, REUSE | {"min_sparse_context": 80}, DelayedStream(order))


@pytest.mark.parametrize(
    ("settings", "aside"),
    [
        pytest.param({}, True, id="sketch"),
        pytest.param({"algorithm": Quest()}, True, id="quest"),
        pytest.param(
            TOKENS | {"algorithm": DSA(), "scope": "layer"},
            False,
            id="dsa-reads-the-indexers-inputs",
        ),
    ],
)
def test_each_layer_of_a_captured_step_serves_full_tail_pages_aside(
    settings: dict[str, Any], aside: bool
) -> None:
    """The step runs twice, to warm up and to be recorded."""
    stream = DelayedStream("late")
    sim = ReplayingSimulator(**settings, aside=stream)
    assert stream.num_started == stream.num_delayed == 2 * sim.layers * aside


def check(scope: str, settings: dict[str, Any], aside: DelayedStream | None = None) -> None:
    plain, recorded = (Simulator(scope=scope, checked=False, **settings) for _ in range(2))
    plain.coordinator.decode.recordable.clear()
    replaying = ReplayingSimulator(scope=scope, **settings, aside=aside)
    expected, _ = play(plain)
    for sim in (recorded, replaying):
        got, _ = play(sim)
        assert_equal(got, expected)
        assert_same(state_of(sim), state_of(plain))
        assert sim.coordinator.stats() == plain.coordinator.stats()
    assert replaying.num_replayed == len(got), "no step had to run eagerly"


@dataclass(frozen=True, kw_only=True)
class ReadsValues(Sketch):
    """Scores as ``sketch``, by code that a replay would not run again, and that PyTorch sees."""

    recordable: ClassVar[bool] = True

    by: str

    def retrieve_topk(self, queries: torch.Tensor, layer_id: int, step: DecodeStep) -> Selection:
        scores, _ = self.score(queries, layer_id, step, tail=None)
        if self.by == "item" and float(queries.sum()) > 0:
            return select(scores, step.num_pages, step.policy.select_rule_with(drop_last=True))
        if self.by == "in place":
            scores.neg_()
        rule = step.policy.select_rule
        return select(scores, step.num_pages, rule, forced=step.forced_pages)


@dataclass(frozen=True, kw_only=True)
class DecidesInPython(Sketch):
    """Of the subclass of an author, whose lengths PyTorch does not see it read."""

    def retrieve_topk(self, queries: torch.Tensor, layer_id: int, step: DecodeStep) -> Selection:
        scores, _ = self.score(queries, layer_id, step, tail=None)
        rule = step.policy.select_rule_with(drop_last=step.seq_lens_cpu.tolist()[0] % 2 == 0)
        return select(scores, step.num_pages, rule, forced=step.forced_pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@crossed(
    "kv_cache_dtype, name",
    ["auto", "int8", "fp8_e4m3"],
    ["sketch", "quest", "snapkv", "item", "in Python", "in place", "quest", "sketch"],
)
def test_a_layer_is_one_call_where_kernels_alone_compute(
    name: str, kv_cache_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values are parts of one tensor, and outputs are kept."""
    calls: list[int] = [0]
    call = cpu._call

    def counted(*arguments: Any) -> Any:
        calls[-1] += 1
        return call(*arguments)

    monkeypatch.setattr(cpu, "_call", counted)
    own = DecidesInPython() if name == "in Python" else ReadsValues(by=name)
    known = ALGORITHMS.get(name)() if name in ALGORITHMS else own

    def outputs(*, records: bool) -> tuple[list[torch.Tensor], list[int]]:
        sim = Simulator(
            checked=False, algorithm=known, dtype=dtype, kv_cache_dtype=kv_cache_dtype, layers=3
        )
        if not records:
            sim.coordinator.decode.recordable.clear()
        requests = [sim.request(slot, 130, seed=slot) for slot in (1, 2)]
        sim.prefill((requests[0], 99), (requests[1], 70))
        found, before = [], len(calls)
        for _ in range(20):
            calls.append(0)
            sim.coordinator.forward_begin(sim.next_tokens(*requests))
            for layer in range(sim.layers):
                tokens = [[getattr(r, x)[layer, r.done - 1] for x in "qkv"] for r in requests]
                joined = torch.stack([torch.cat(x) for x in tokens])
                parts = joined.split([sim.q_heads, sim.kv_heads, sim.kv_heads], dim=1)
                found.append(sim.coordinator.attention(layer, *parts))
            sim.coordinator.forward_end()
        return found, calls[before:]

    (expected, plain), (got, replayed) = outputs(records=False), outputs(records=True)
    assert all(map(torch.equal, got, expected))
    one_call = name in ("sketch", "quest")
    assert (sum(replayed) < sum(plain) / 2) == one_call, f"{replayed} calls of {plain}"
    if one_call and kv_cache_dtype == "auto":
        assert 2 * 3 in replayed, "a layer that serves a full page makes two"


@pytest.mark.parametrize("whose", ["algorithm", "engine"])
def test_an_error_of_a_recorded_layer_is_that_of_an_unrecorded_one(whose: str) -> None:
    """A server ends the requests of an algorithm's errors, which name it and the layer."""
    found = []
    for records in (False, True):
        sim = Simulator(checked=False, layers=2, algorithm=Quest())
        if not records:
            sim.coordinator.decode.recordable.clear()
        request = sim.request(1, 130, seed=1)
        sim.prefill((request, 99))
        for _ in range(4):
            sim.decode(request)
        assert bool(sim.coordinator.decode._recorded._calls) == records
        if whose == "algorithm":
            request.host_pages[1] = 10_000
        else:
            sim.manager.device.state(1).lru_order[:] = 10_000
        with pytest.raises(HiSparseError) as error:
            sim.decode(request)
        found.append((type(error.value), str(error.value)))
    assert found[0] == found[1]
    name, expected = {
        "algorithm": (
            AlgorithmError,
            r"Quest \(.*\), layer 0, retrieve_topk: got KernelError",
        ),
        "engine": (KernelError, "lru_order: got slot 10000 in state row 3, entry 0, expected"),
    }[whose]
    assert found[0][0] is name
    assert re.match(expected, found[0][1])


def test_steps_between_few_shapes_are_recorded_once() -> None:
    """As requests come and go; a fifth number of requests takes the place of the oldest."""
    settings = TOKENS | {"layers": 1, "algorithm": Quest(), "num_slots": 6}
    plain, sim = (Simulator(checked=False, **settings) for _ in range(2))
    plain.coordinator.decode.recordable.clear()
    counts = (1, 1, 2, 2, 1, 2, 3, 3, 4, 4, 1, 5, 5, 2)
    outs: list[list[torch.Tensor]] = []
    recorded = []
    for each in (plain, sim):
        requests = [each.request(1, 500, seed=1)]
        requests += [each.request(slot, 150, seed=slot) for slot in range(2, 6)]
        for request in requests:
            each.prefill((request, 482 if request.slot == 1 else 120))
        outs.append([])
        for count in counts:
            outs[-1].append(each.decode(*requests[:count]))
            recorded.append(bool(each.coordinator.decode._recorded._calls))
    assert_equal(outs[1], outs[0])
    # When five come, steps of two are those that ended the longest ago.
    known = [count in counts[:at] for at, count in enumerate(counts[:-1])]
    assert recorded[len(counts) :] == [*known, False]


def test_most_steps_are_recorded_while_contexts_grow() -> None:
    """Pages of one token: each step adds one to what can be selected, to at most 543."""
    sim = Simulator(checked=False, layers=1, algorithm=Quest(), **TOKENS)
    requests = [sim.request(slot, 545, seed=slot) for slot in (1, 2)]
    sim.prefill((requests[0], 512), (requests[1], 300))
    recorded = []
    for _ in range(32):
        sim.decode(*requests)
        recorded.append(bool(sim.coordinator.decode._recorded._calls))
    # Two steps of shapes that are new, from 512 pages and from 513 on.
    assert recorded.count(False) <= 4
