"""``miss: host``: the CPU attends missing pages in host memory, and nobody sees a difference."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.adapters import TorchAdapter
from hisparse.algorithms import SelectionPolicy
from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.quest import Quest
from hisparse.cache import SparseKVCacheManager
from hisparse.cache.allocate import zeros
from hisparse.cache.staging import Staging
from hisparse.cache.streams import SideStream
from hisparse.cache.swap_in import SwapIn
from hisparse.config import HiSparseConfig
from hisparse.engine import host_attention
from hisparse.engine.capabilities import resolve_miss
from hisparse.engine.host_attention import CudaHostAttention
from hisparse.errors import ConfigError, HiSparseError, KernelError
from hisparse.kernels import HostAttentionCalls
from hisparse.kernels.build import cuda
from hisparse.memory.costs import Resources, away_bytes, make_sizing_request
from hisparse.testing import Simulator
from hisparse.testing.recording import ReplayingSimulator
from tests.delayed import DelayedStream, Order
from tests.engine.test_invariants import DENSE, FP8_LATENTS, LAYOUTS, STORED, assert_dense
from tests.engine.test_replay import ORDERS, REUSE, TIGHT, assert_equal, assert_same, play, state_of
from tests.engine.test_verify import random_draft, simulator
from tests.kernels.fibers.build import fiber_library
from tests.sizes import crossed, sized

HOST: dict[str, Any] = {"miss": "host"}
SINKS = torch.linspace(-1, 3, 16).view(4, 4)
#: What else a layer does, beside the formats and scopes.
STEPS = [
    pytest.param(REUSE, id="reuse"),
    pytest.param(REUSE | TIGHT, id="reuse-tight"),
    pytest.param({"algorithm": DIPR(alpha=0.5)}, id="dipr"),
    pytest.param({"extensions": {"tail_estimate": True}}, id="tail-estimate"),
    pytest.param({"min_sparse_context": 100, "dense_layers": (0,), "max_row": 64}, id="staged"),
    pytest.param(
        {"layers": 4, "windows": (20, 0, 0, 33), "logit_cap": 5.0, "sinks": SINKS}, id="windows"
    ),
]


#: Formats that attention by the CPU reads as they are.
IN_STREAM = [x for x in STORED if x.id not in FP8_LATENTS]


def long_play(sim: Simulator) -> list[Tensor]:
    """Prompts in chunks over prefixes of several tiles, a shared prefix, and steps in between."""
    one, two = sim.request(1, 190, seed=1, prompt=165), sim.request(2, 190, seed=2, prompt=90)
    outs = [*sim.prefill((one, 61)), *sim.prefill((one, 43), (two, 37)), sim.decode(two)]
    outs += sim.prefill((one, 61), (two, 52))
    outs += [sim.decode(one, two) for _ in range(9)]
    three = sim.request(3, 190, seed=3, like=one, shared=96)
    outs += sim.prefill((three, 30))
    return outs + [sim.decode(three, one, two) for _ in range(14)]


def assert_near(got: list[Tensor], expected: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda m, n=number: f"forward {n}: {m}")


@pytest.fixture
def in_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's part as a GPU's server runs it.

    Stand-ins: host memory for the GPU's, and the caller for the thread that CUDA's driver has for
    host functions (``host_api.h`` of the fibers).
    """

    def make(manager: SparseKVCacheManager, policy: SelectionPolicy) -> CudaHostAttention:
        sizes = away_bytes(HiSparseConfig(min_sparse_context=1000, page_size=4), policy, 8)
        return CudaHostAttention(manager, policy, sizes)

    monkeypatch.setattr(cuda, "cuda_library", fiber_library)
    monkeypatch.setattr(host_attention, "zeros", lambda *args, pin: zeros(*args))
    monkeypatch.setattr(host_attention, "HostAttention", make)


@pytest.mark.parametrize("settings", [*STORED, *STEPS])
def test_outputs_and_residency_are_those_of_transfer(settings: dict[str, Any]) -> None:
    """The step machine compares both with float64 attention over the selection."""
    sims = [Simulator(**settings | each) for each in ({}, HOST)]
    expected, got = [long_play(sim) for sim in sims]
    assert_near(got, expected)
    if "windows" not in settings:  # Representations of some layers only cannot be compared so.
        assert_same(state_of(sims[1]), state_of(sims[0]))
    transfer, host = [sim.coordinator.stats() for sim in sims]
    assert transfer.away_pages == 0
    assert 0 < host.away_pages <= host.miss_pages == transfer.miss_pages


@crossed("settings, order", [*STEPS, *sized(STORED[2:5], STORED)], ORDERS)
def test_in_any_order_of_the_side_stream_no_bit_differs(
    settings: dict[str, Any], order: Order
) -> None:
    plain = Simulator(**settings | HOST)
    sim = Simulator(**settings | HOST, aside=DelayedStream(order))
    assert_equal(long_play(sim), long_play(plain))
    if "windows" not in settings:
        assert_same(state_of(sim), state_of(plain))
    assert sim.coordinator.stats() == plain.coordinator.stats()


@pytest.mark.usefixtures("in_stream")
@crossed("settings, order", [*STEPS[:4], *sized(IN_STREAM[1:2], IN_STREAM)], ORDERS)
def test_a_stream_calls_the_cpu_in_its_order(settings: dict[str, Any], order: Order) -> None:
    sim = Simulator(**settings | HOST, aside=DelayedStream(order))
    expected = Simulator(**settings)
    assert_near(long_play(sim), long_play(expected))
    if "windows" not in settings:
        assert_same(state_of(sim), state_of(expected))
    assert sim.coordinator.stats().away_pages > 0
    sim.coordinator.decode.raise_host_error()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {
                "page_size": 2,
                "budget": 16,
                "device_buffer": 16,
                "max_row": 16,
                "num_recent_pages": 1,
            },
            id="no-spare-page",
        ),
        pytest.param({"budget": 20}, id="several-tokens-a-run"),
    ],
)
def test_drafts_wait_for_what_the_tokens_before_them_load(
    settings: dict[str, Any], order: Order
) -> None:
    outs: list[Tensor] = []
    for stream in (SideStream(), DelayedStream(order)):
        sim, requests = simulator(settings | HOST | {"aside": stream})
        rng = random.Random(7)
        for _ in range(5):
            drafts = [random_draft(x, y, 5, rng) for x, y in zip(*[requests] * 2, strict=True)]
            outs.append(sim.verify(*drafts))
        assert sim.coordinator.stats().away_pages > 0
    assert_equal(outs[5:], outs[:5])


@pytest.mark.usefixtures("in_stream")
def test_an_error_of_the_cpu_is_raised_before_the_next_forward() -> None:
    sim = Simulator(**HOST, algorithm=Quest(), layers=1, max_row=64, checked=False)
    request = sim.request(1, 190, seed=1)
    sim.prefill((request, 150))
    launch, tables = HostAttentionCalls.launch, []

    def spoiled(self: HostAttentionCalls, *given: Any) -> None:
        tables.append(given[4])
        tables[-1][:, 0] = 10_000
        launch(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostAttentionCalls, "launch", spoiled)
        sim.decode(request)
    assert tables
    other = Simulator(**HOST, layers=1)
    other.prefill((other.request(1, 90, seed=2), 80))
    line = "^layer 0, attention in host memory: page_table: got 10000 in row 0"
    with pytest.raises(KernelError, match=line):
        sim.decode(request)
    sim.decode(request)


@pytest.mark.parametrize("settings", DENSE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_contexts_that_do_not_fit_are_attended_where_they_lie(
    settings: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulator(**HOST | settings, layout=layout)
    a, b = sim.request(1, 120, seed=2), sim.request(2, 100, seed=3)
    sim.prefill((a, 100), (b, 61))
    monkeypatch.delattr(Staging, "read")
    for _ in range(18):
        out = sim.decode(a, b)
        assert_dense(sim, out[:, :1], a, 1)
        assert_dense(sim, out[:, 1:], b, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_captured_steps_are_the_eager_ones(order: Order) -> None:
    settings = HOST | {"min_sparse_context": 80}
    eager = Simulator(checked=False, **settings)
    replaying = ReplayingSimulator(aside=DelayedStream(order), **settings)
    expected, got = play(eager)[0], play(replaying)[0]
    assert replaying.num_replayed == len(got)
    assert_equal(got, expected)
    assert_same(state_of(replaying), state_of(eager))


def test_a_page_that_is_attended_is_checked_and_one_that_is_away_is_not() -> None:
    sim = Simulator(**HOST, algorithm=Quest(), layers=1, max_row=64)
    request = sim.request(1, 190, seed=1)
    sim.prefill((request, 150))
    sim.decode(request)
    assert sim.coordinator.stats().away_pages > 0
    sim.manager.device.stored(0).k.add_(1.0)
    with pytest.raises(HiSparseError, match="differs from host page"):
        sim.decode(request)


def test_transfer_asks_for_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given, diff = [], SwapIn.diff

    def spy(self: SwapIn, *arguments: Any, **named: Any) -> Any:
        given.append(arguments[5])
        return diff(self, *arguments, **named)

    monkeypatch.setattr(SwapIn, "diff", spy)
    sim = Simulator()
    assert sim.coordinator.decode._host is None
    long_play(sim)
    assert set(given) == {True}


def test_what_a_gpu_needs_for_it_is_charged() -> None:
    """Page-locked memory, and on the device the results with what merges them."""
    sims = [Simulator(**each) for each in ({}, HOST)]
    sizes = {"host_bytes": 1 << 30, "device_bytes": 1 << 30, "context_length": 1000}
    resources = Resources(**sizes, max_requests=8, device_type="cuda")
    plain, host = (
        make_sizing_request(x.resolved, x.policy, resources, kept={}, adapter=TorchAdapter)
        for x in sims
    )
    charged = away_bytes(sims[1].config, sims[1].policy, 8)
    assert plain.host_bytes - host.host_bytes == sum(charged)
    assert host.workspace(8) - plain.workspace(8) == 2 * charged.results
    assert charged.results == 9 * 4 * (sims[1].spec.v_head_dim + 1) * 4


def test_a_gpu_refuses_pages_that_the_cpu_would_have_to_decode() -> None:
    latents = Simulator(kv_heads=1, latent_rank=8, kv_cache_dtype="fp8_e4m3", scope="layer").spec
    config = HiSparseConfig(miss="host", kv_cache_dtype="fp8_e4m3")
    resolve_miss(config, latents, "cpu")
    resolve_miss(config, Simulator(kv_cache_dtype="fp8_e4m3").spec, "cuda")
    with pytest.raises(ConfigError, match=r"on device cuda, expected"):
        resolve_miss(config, latents, "cuda")


AUTO: dict[str, Any] = {"miss": "auto"}


def test_auto_is_transfer_where_the_cpu_has_nothing_to_gain() -> None:
    latents = Simulator(kv_heads=1, latent_rank=8, kv_cache_dtype="fp8_e4m3", scope="layer").spec
    plain, auto = Simulator().spec, HiSparseConfig(miss="auto")
    resolved = [resolve_miss(auto, *on).miss for on in ((plain, "cpu"), (latents, "cuda"))]
    assert resolved == ["transfer", "transfer"]
    assert resolve_miss(auto, plain, "cuda").miss == "auto"


@pytest.mark.usefixtures("in_stream")
@pytest.mark.parametrize(
    ("link", "cpu"), [(9e-6, 2e-6), (3e-6, 2.9e-6), (2e-6, 3e-6), (1e-6, 1e-6)]
)
def test_auto_attends_from_as_many_requests_as_make_that_faster(
    link: float, cpu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the sum itself: the first number whose pages the CPU attends sooner, call included."""
    times, threads = [], []

    def seconds(run: Any, parts: Any, device: torch.device) -> float:
        run(parts[-1])  # What is timed runs on the pools of an engine.
        threads.append(torch.get_num_threads())
        times.append((link, cpu)[len(times)])
        return times[-1]

    monkeypatch.setattr(host_attention, "_seconds_a_page", seconds)
    monkeypatch.setattr(host_attention, "_threads_of_a_gpu", lambda: 2)
    sim = Simulator(**AUTO, scope="query_head", q_heads=4, kv_heads=2, head_dim=8)
    host = sim.coordinator.decode._host
    missing = 0.05 * sim.policy.max_pages * sim.policy.heads
    wanted = [n for n in range(1, 2000) if 20e-6 + n * missing * cpu < n * missing * link]
    assert len(times) == 2
    assert threads == [1, 2]  # As tests have PyTorch's, and as attention will have.
    assert torch.get_num_threads() == 1
    assert (None if host is None else host.min_requests) == next(iter(wanted), None)


@pytest.mark.parametrize(
    ("cores", "gpus", "threads"), [(96, 8, 11), (16, 1, 15), (2, 0, 1), (4, 8, 1)]
)
def test_gpus_share_the_cores(
    cores: int, gpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one each: though SGLang leaves PyTorch a single thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert host_attention._threads_of_a_gpu() == threads


def test_a_step_of_too_few_requests_loads_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention.HostAttention, "measure", lambda host: None)
    monkeypatch.setattr(host_attention.HostAttention, "min_requests", 2)
    sims = [Simulator(**each) for each in ({}, AUTO)]
    requests = [[sim.request(slot, 190, seed=slot) for slot in (1, 2)] for sim in sims]
    away, outs = [], [[], []]
    for sim, (one, two), found in zip(sims, requests, outs, strict=True):
        found += sim.prefill((one, 150), (two, 150))
        for batch in ((one,),) * 6 + ((one, two),) * 6:
            found.append(sim.decode(*batch))
            away.append(sim.coordinator.stats().away_pages)
    assert_near(outs[1], outs[0])
    assert_same(state_of(sims[1]), state_of(sims[0]))
    assert away[12:18] == [0] * 6
    assert away[-1] > 0


@pytest.mark.usefixtures("in_stream")
def test_a_gpu_refuses_it_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cuda_library", lambda: None)
    with pytest.raises(ConfigError, match='miss: got "host" without native kernels, expected'):
        Simulator(**HOST)
