"""The invariants of the design on the real coordinator, with random K/V in place of a model.

They hold for every format in which K and V are stored: for the values that are read back.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms import DecodeStep
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.algorithms.topp import TopP
from hisparse.cache.formats import format_of
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import ReplayingSimulator
from hisparse.types import Selection
from tests.delayed import DelayedStreams, Order
from tests.engine.test_replay import assert_same, state_of
from tests.sizes import crossed

SCOPES = ["layer", "kv_head", "query_head"]
LAYOUTS = ["layer_first", "page_first", "page_head"]
FP8, INT8 = {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "int8"}
MLA: dict[str, Any] = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}
TOKENS = {
    "page_size": 1,
    "host_pages": 1600,
    "num_sink_pages": 0,
    "num_recent_pages": 0,
    "staging_pages": 16,
}
#: Latents (MLA), by what is selected.
LATENTS = {
    "latents-quest": MLA | {"algorithm": Quest()},
    "latents-sketch": MLA | {"algorithm": Sketch()},
    "latents-topp": MLA | {"algorithm": TopP(mass=0.8)},
    "latents-dsa": MLA | TOKENS | {"algorithm": DSA()},
    "latents-tail-estimate": MLA | {"extensions": {"tail_estimate": True}},
}
FP8_LATENTS = {f"fp8-{name}": settings | FP8 for name, settings in LATENTS.items()}
#: Each format in each scope; latents by what is selected.
STORED = [
    pytest.param({"scope": scope} | form, id=f"{name}-{scope}")
    for name, form in (("plain", {}), ("fp8", FP8), ("int8", INT8))
    for scope in SCOPES
]
STORED += [pytest.param(x, id=name) for name, x in (LATENTS | FP8_LATENTS).items()]


def assert_dense(
    sim: Simulator, out: Tensor, request: Request, num_tokens: int, layers: Any = slice(None)
) -> None:
    """The outputs ``[L, n, Hq, D]`` of a request's last tokens are those of dense attention.

    Over K and V as they are read back.
    """
    k, v = format_of(sim.spec).as_read(request.k, request.v)
    want = sim.dense(replace(request, k=k, v=v), request.done - num_tokens, request.done)
    assert_close(out[layers].double(), want[layers], rtol=1e-4, atol=1e-5)


@crossed("settings, layout", STORED, LAYOUTS)
def test_budget_of_the_whole_context_is_dense(settings: dict[str, Any], layout: str) -> None:
    """Invariant 1, with chunk boundaries inside and at the edge of pages."""
    whole = {"budget": 96, "device_buffer": 96, "max_row": 96, "layout": layout}
    sim = Simulator(**whole | settings)
    request = sim.request(1, 90, seed=0)
    for chunk in (5, 11, 24, 1, 20):
        (out,) = sim.prefill((request, chunk))
        assert_dense(sim, out, request, chunk)
        exact = sim.dense(request, request.done - chunk, request.done)
        rounded = (out - exact).abs().max() > 1e-3
        assert rounded == ("kv_cache_dtype" in settings), "eight bits round"
    for _ in range(29):
        assert_dense(sim, sim.decode(request), request, 1)


@pytest.mark.parametrize("chunk", [7, 8, 16, 61], ids=lambda c: f"chunk{c}")
def test_prefill_is_exact_however_long_the_prefix(chunk: int) -> None:
    """The prefix streams through a staging tile of 3 pages; rows hold only 4 pages."""
    sim = Simulator(budget=32, device_buffer=32, max_row=32, device_pages=8, num_slots=2)
    request = sim.request(1, 183, seed=1)
    while request.done < 183:
        n = min(chunk, 183 - request.done)
        (out,) = sim.prefill((request, n))
        assert_dense(sim, out, request, n)


#: Contexts that fit their rows, and those that stream from host memory. Eight-bit latents that are
#: wider than a selection are decoded in parts, which are merged.
DENSE = [
    pytest.param({"min_sparse_context": 1000}, id="short-context-resident"),
    pytest.param({"min_sparse_context": 1000, "max_row": 64}, id="short-context-staged"),
    pytest.param({"dense_layers": (0, 1)}, id="dense-layers-resident"),
    pytest.param({"dense_layers": (0, 1), "max_row": 64}, id="dense-layers-staged"),
]


@pytest.mark.parametrize("settings", DENSE)
@pytest.mark.parametrize(
    "form", [*({"scope": x} for x in SCOPES), FP8, MLA | FP8], ids=[*SCOPES, "fp8", "fp8-latents"]
)
def test_dense_service_equals_dense_attention(
    form: dict[str, Any], settings: dict[str, Any]
) -> None:
    sim = Simulator(**form | settings)
    a, b = sim.request(1, 120, seed=2), sim.request(2, 100, seed=3)
    sim.prefill((a, 100), (b, 61))
    for _ in range(18):
        out = sim.decode(a, b)
        assert_dense(sim, out[:, :1], a, 1)
        assert_dense(sim, out[:, 1:], b, 1)


def attended(sim: Simulator, request: Request, selection: Selection, row: int) -> Tensor:
    """Float64 attention of the last position over exactly the selected pages and the tail."""
    size, last = sim.page_size, request.done - 1
    heads, group = sim.policy.heads, sim.spec.group_size
    outs = []
    for q_head in range(sim.q_heads):
        head = q_head * heads // sim.q_heads
        chosen = [p for p in selection.pages[row, head].tolist() if p >= 0]
        keep = [p * size + i for p in chosen for i in range(size)]
        keep += range(last // size * size, last + 1)
        k = request.k[0, keep, q_head // group].double()
        v = request.v[0, keep, q_head // group].double()
        logits = (k @ request.q[0, last, q_head].double()) * 0.3
        outs.append(logits.softmax(0) @ v)
    return torch.stack(outs)


@pytest.mark.parametrize("scope", SCOPES)
def test_sparse_decoding_attends_exactly_what_was_selected(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also invariant 6: selections are in range, unique, within the budget, and include sinks."""
    sim = Simulator(scope=scope, layers=1)
    seen: list[Selection] = []
    retrieve = type(sim.algorithm).retrieve_topk

    def spy(self: object, q: Tensor, layer_id: int, batch: DecodeStep) -> Selection:
        seen.append(retrieve(self, q, layer_id, batch))
        return seen[-1]

    monkeypatch.setattr(type(sim.algorithm), "retrieve_topk", spy)
    a, b = sim.request(1, 180, seed=4), sim.request(3, 100, seed=5)
    sim.prefill((a, 125), (b, 50))
    for _ in range(45):
        out = sim.decode(a, b)[0]
        selection = seen[-1]
        for row, request in enumerate((a, b)):
            assert_close(
                out[row], attended(sim, request, selection, row).float(), rtol=1e-4, atol=1e-5
            )
            num_pages = (request.done - 1) // sim.page_size
            for pages, length in zip(selection.pages[row], selection.lengths[row], strict=True):
                chosen = [p for p in pages.tolist() if p >= 0]
                assert len(chosen) == length <= sim.policy.max_pages
                assert all(x < y for x, y in pairwise(chosen))
                assert {0, num_pages - 1} <= set(chosen) <= set(range(num_pages))


def run_alone(settings: dict[str, object], length: int, seed: int, prompt: int) -> Tensor:
    sim = Simulator(**settings)
    request = sim.request(2, length, seed)
    (first,) = sim.prefill((request, prompt))
    return torch.cat([first, *(sim.decode(request) for _ in range(length - prompt))], dim=1)


@pytest.mark.parametrize("scope", SCOPES)
def test_other_requests_never_change_a_request(scope: str) -> None:
    """Invariants 3 and 4: rows are reused, shrink and grow; the outputs stay bitwise the same."""
    heads = {"layer": 1, "kv_head": 2, "query_head": 4}[scope]
    tight = {
        "scope": scope,
        "device_pages": 24 * heads,
        "device_buffer": 48,
        "max_row": 192,
        "num_slots": 5,
    }
    alone = run_alone(tight, 150, seed=6, prompt=100)
    sim = Simulator(**tight)
    request = sim.request(2, 150, seed=6)
    (first,) = sim.prefill((request, 100))
    outs, others, capacities = [first], [], []
    for step in range(50):
        if step % 12 == 5:
            other = sim.request([1, 3, 4][step // 12 % 3], 150, seed=step)
            sim.prefill((other, 90 + step))
            others.append(other)
        if step % 12 == 11:
            sim.end(others.pop(0))
        batch = [*others, request] if step % 2 else [request, *others]
        outs.append(sim.decode(*batch)[:, [batch.index(request)]])
        capacities.append(sim.manager.residency.capacities.held[2])
    assert_close(torch.cat(outs, dim=1), alone, rtol=1e-5, atol=1e-6)
    assert len(set(capacities)) > 1, "the row was to shrink and to grow"


@pytest.mark.parametrize("form", [{}, FP8], ids=["plain", "fp8"])
def test_a_shared_prefix_gives_what_each_request_gives_alone(form: dict[str, Any]) -> None:
    """Invariant 5: the second request reads the first one's host pages and summaries."""
    sim = Simulator(**form)
    a = sim.request(1, 120, seed=7)
    sim.prefill((a, 100))
    b = sim.request(2, 120, seed=8, like=a, shared=64)
    (prompt,) = sim.prefill((b, 30))
    assert_dense(sim, prompt, b, 30)
    shared = [sim.decode(a, b)[:, 1:] for _ in range(20)]

    alone = Simulator(**form)
    twin = alone.request(1, 120, seed=8, like=a, shared=64)
    twin.host_pages, twin.done = [], 0
    alone.prefill((twin, 94))
    for step in shared:
        assert_close(step, alone.decode(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(FP8 | {"algorithm": Quest()}, id="fp8-quest"),
        pytest.param(FP8 | {"algorithm": Oracle()}, id="fp8-oracle"),
        pytest.param(MLA | FP8 | {"algorithm": Quest()}, id="fp8-latents-quest"),
        pytest.param(MLA | FP8 | {"algorithm": Sketch()}, id="fp8-latents-sketch"),
    ],
)
def test_chunks_of_a_prompt_change_no_token(settings: dict[str, Any]) -> None:
    """New K and V are rounded like stored ones, for attention and for representations."""
    outs = []
    for chunks in ((100,), (37, 63), (8, 8, 84)):
        sim = Simulator(**settings)
        request = sim.request(1, 130, seed=4)
        prompt = torch.cat([sim.prefill((request, n))[0] for n in chunks], dim=1)
        outs.append(torch.cat([prompt, *(sim.decode(request) for _ in range(30))], dim=1))
    for other in outs[1:]:
        assert_close(other, outs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [MLA, MLA | FP8], ids=["latents", "fp8-latents"])
def test_a_small_buffer_changes_no_token(form: dict[str, Any]) -> None:
    """A small buffer forces swaps; the manager compares every resident byte."""
    outs = []
    for device_buffer in (32, 128):
        sim = Simulator(**form, algorithm=Oracle(), device_buffer=device_buffer, max_row=128)
        first, second = sim.request(1, 180, seed=1), sim.request(2, 180, seed=2)
        sim.prefill((first, 120), (second, 77))
        outs.append(torch.stack([sim.decode(first, second) for _ in range(40)]))
    assert_close(outs[0], outs[1])


@pytest.mark.parametrize("order", ["early", "late", 3])
def test_transfers_beside_compute_change_no_bit(order: Order) -> None:
    """Staged prefixes, pages placed by a prompt, and dense tiles, copied at another time."""
    outs = []
    for streams in (None, DelayedStreams(order)):
        sim = Simulator(**FP8, max_row=64, dense_layers=(1,), side_streams=streams)
        request = sim.request(1, 160, seed=12)
        steps = [sim.prefill((request, n))[0] for n in (45, 60)]
        steps += [sim.decode(request) for _ in range(20)]
        outs.append(torch.cat(steps, dim=1))
    assert torch.equal(*outs)


@pytest.mark.parametrize("settings", FP8_LATENTS.values(), ids=FP8_LATENTS)
def test_captured_steps_and_side_streams_change_no_bit(settings: dict[str, Any]) -> None:
    settings = settings | {"min_sparse_context": 60}
    plain, outs = Simulator(**settings, checked=False), []
    replaying = ReplayingSimulator(**settings, side_streams=DelayedStreams("late"))
    for sim in (plain, replaying):
        a, b = sim.request(1, 150, seed=5), sim.request(2, 150, seed=6)
        steps = [*sim.prefill((a, 70), (b, 41)), *sim.prefill((b, 25))]
        outs.append(torch.cat([*steps, *(sim.decode(a, b) for _ in range(25))], dim=1))
    assert torch.equal(*outs)
    assert_same(state_of(replaying), state_of(plain))
    assert replaying.num_replayed > 0


@pytest.mark.parametrize(
    ("scope", "form"),
    [*((scope, {}) for scope in SCOPES), ("layer", FP8), ("kv_head", INT8), ("query_head", FP8)],
)
def test_resident_bytes_equal_host_bytes(scope: str, form: dict[str, Any]) -> None:
    """Invariants 2 and 3, after prefill, swaps, tail promotions, shrinking and growing."""
    small = {"device_pages": 40, "device_buffer": 32, "max_row": 96, "num_slots": 3}
    sim = Simulator(scope=scope, **form, **small)
    a, b = sim.request(1, 150, seed=9), sim.request(2, 150, seed=10)
    sim.prefill((a, 90))
    for step in range(40):
        if step == 10:
            sim.prefill((b, 77))
        if step == 30:
            sim.end(b)
        live = [a, b] if 10 <= step < 30 else [a]
        sim.decode(*live)
        for request in live:
            assert check_residents(sim, request) > 0


@pytest.mark.parametrize("scope", SCOPES)
def test_replaced_host_pages_replace_resident_pages(scope: str) -> None:
    """Of pages that two requests computed, SGLang keeps one; both attend it, resident or not."""
    sims = [
        Simulator(scope=scope, max_row=192),
        Simulator(scope=scope, device_buffer=40, max_row=40),
        ReplayingSimulator(scope=scope, max_row=192),
    ]
    outs = []
    for sim in sims:
        a, b = sim.request(1, 150, seed=14), sim.request(2, 150, seed=15)
        sim.prefill((a, 100), (b, 60))
        sim.prefill((b, 40))
        # As if SGLang's scheduler was a step ahead.
        first = sim.decode(b)
        before = sim.coordinator.stats().miss_pages
        b.host_pages[:5] = a.host_pages[:5]
        sim.coordinator.on_pages_replaced(2)
        outs.append(torch.cat([first, *(sim.decode(a, b)[:, 1:] for _ in range(20))], 1))
        check_residents(sim, b)
        loaded = sim.coordinator.stats().miss_pages - before
        if sim is not sims[1]:
            assert 0 < loaded <= 5 * sim.policy.heads * sim.layers, "other pages stay resident"
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def check_residents(sim: Simulator, request: Request) -> int:
    """Compare every resident page of a request with its host page; returns how many there are."""
    heads, kv_heads, count = sim.policy.heads, sim.kv_heads, 0
    for layer in range(sim.layers):
        state = sim.manager.device.state(layer)
        pools = [x.stored(layer).tensors for x in (sim.manager.device, sim.manager.host)]
        for head in range(heads):
            row = request.slot * heads + head
            which = slice(None) if heads == 1 else [head * kv_heads // heads]
            for page, device_page in zip(
                state.slot_pages[row].tolist(), state.device_pages[row].tolist(), strict=True
            ):
                if page >= 0:
                    count += 1
                    for here, there in zip(*pools, strict=True):
                        a, b = here[device_page], there[request.host_pages[page], which]
                        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return count


def test_a_lone_request_with_room_reads_nothing_while_it_decodes() -> None:
    sim = Simulator(max_row=256)
    request = sim.request(1, 220, seed=11)
    for _ in range(4):
        sim.prefill((request, 40))
    before = sim.coordinator.stats()
    for _ in range(60):
        sim.decode(request)
    after = sim.coordinator.stats()
    assert after.decode_read_bytes == 0
    assert after.miss_pages == 0 < after.hit_pages
    assert after.written_bytes - before.written_bytes == 60 * sim.manager.host.format.token_bytes


def test_a_radix_hit_leaves_a_warm_row_behind() -> None:
    sim = Simulator(max_row=256)
    a = sim.request(1, 160, seed=12)
    sim.prefill((a, 128))
    b = sim.request(2, 160, seed=13, like=a, shared=128)
    sim.prefill((b, 10))
    for _ in range(20):
        sim.decode(b)
    assert sim.coordinator.stats().decode_read_bytes == 0


def test_ended_requests_give_everything_back() -> None:
    """Invariant 7."""
    sim = Simulator(num_slots=3)
    free = sim.manager.device.num_free.clone()
    a, b = sim.request(1, 100, seed=14), sim.request(2, 100, seed=15)
    sim.prefill((a, 80), (b, 60))
    sim.decode(a, b)
    assert (sim.manager.device.num_free < free).all()
    sim.end(a)
    sim.end(b)
    nobody = np.empty(0, dtype=np.int64)
    sim.manager.start_forward(nobody, nobody)
    assert torch.equal(sim.manager.device.num_free, free)
    assert not sim.manager.residency.capacities.held[1:3].any()
    assert (sim.manager.device.capacity == 0).all()
    for layer_pages in sim.manager.device.free_pages:
        assert len(set(layer_pages.tolist())) == layer_pages.numel()
