"""Latents stored in eight bits (MLA): the invariants hold for the latents that are read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.algorithms.topp import TopP
from hisparse.cache import HostKVPool
from hisparse.cache.formats import format_of
from hisparse.cache.serializer import PageSerializer
from hisparse.config import HiSparseConfig
from hisparse.engine.build import build_engine, resolve
from hisparse.memory.costs import Resources
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import ReplayingSimulator
from hisparse.types import KVSpec
from tests.delayed import DelayedStreams
from tests.engine.test_replay import assert_same, state_of

MLA: dict[str, Any] = {
    "kv_cache_dtype": "fp8_e4m3",
    "scope": "layer",
    "kv_heads": 1,
    "head_dim": 24,
    "latent_rank": 16,
}
#: 16 codes, a scale, 8 rotary channels of two bytes, padding.
ROW_BYTES = 48
TOKENS = {
    "page_size": 1,
    "host_pages": 1600,
    "num_sink_pages": 0,
    "num_recent_pages": 0,
    "staging_pages": 16,
}
ALGORITHMS = [
    pytest.param({"algorithm": Quest()}, id="quest"),
    pytest.param({"algorithm": Sketch()}, id="sketch"),
    pytest.param({"algorithm": TopP(mass=0.8)}, id="topp"),
    pytest.param({"algorithm": DSA()} | TOKENS, id="dsa"),
    pytest.param({"extensions": {"tail_estimate": True}}, id="tail-estimate"),
]


def expected(sim: Simulator, request: Request, start: int, stop: int) -> Tensor:
    """Dense float64 attention over the request's latents, rounded as they are stored."""
    k, v = format_of(sim.spec).as_read(request.k, request.v)
    return sim.dense(replace(request, k=k, v=v), start, stop).float()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_budget_of_the_whole_context_is_dense(algorithm: dict[str, Any], layout: str) -> None:
    sizes = {"budget": 96, "device_buffer": 96, "max_row": 96}
    sim = Simulator(**MLA | algorithm, **sizes, layout=layout)
    request = sim.request(1, 90, seed=0)
    for chunk in (5, 24, 32):
        start = request.done
        (out,) = sim.prefill((request, chunk))
        assert_close(out, expected(sim, request, start, request.done), rtol=1e-4, atol=1e-5)
        exact = sim.dense(request, start, request.done).float()
        assert (out - exact).abs().max() > 1e-3, "eight bits round"
    for _ in range(29):
        out = sim.decode(request)
        want = expected(sim, request, request.done - 1, request.done)
        assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        # Wider than a selection: decoded in parts that are merged.
        pytest.param({"min_sparse_context": 1000}, id="resident"),
        pytest.param({"dense_layers": (0, 1), "max_row": 64}, id="staged"),
    ],
)
def test_dense_contexts_are_read_as_they_were_stored(settings: dict[str, Any]) -> None:
    sim = Simulator(**MLA | settings)
    a, b = sim.request(1, 120, seed=2), sim.request(2, 100, seed=3)
    sim.prefill((a, 100), (b, 61))
    for _ in range(18):
        out = sim.decode(a, b)
        for row, request in enumerate((a, b)):
            want = expected(sim, request, request.done - 1, request.done)
            assert_close(out[:, [row]], want, rtol=1e-4, atol=1e-5)


def test_sparse_steps_attend_the_pages_that_were_chosen() -> None:
    """A small buffer forces swaps; the manager compares every resident byte."""
    outs = []
    for device_buffer in (32, 128):
        sim = Simulator(**MLA, algorithm=Oracle(), device_buffer=device_buffer, max_row=128)
        first, second = sim.request(1, 180, seed=1), sim.request(2, 180, seed=2)
        sim.prefill((first, 120), (second, 77))
        outs.append(torch.stack([sim.decode(first, second) for _ in range(40)]))
    assert_close(outs[0], outs[1])


@pytest.mark.parametrize("algorithm", [Quest(), Sketch()], ids=["quest", "sketch"])
def test_chunks_of_a_prompt_change_no_token(algorithm: Any) -> None:
    outs = []
    for chunks in ((100,), (37, 63), (8, 8, 84)):
        sim = Simulator(**MLA, algorithm=algorithm)
        request = sim.request(1, 130, seed=4)
        prompt = torch.cat([sim.prefill((request, n))[0] for n in chunks], dim=1)
        outs.append(torch.cat([prompt, *(sim.decode(request) for _ in range(30))], dim=1))
    for other in outs[1:]:
        assert_close(other, outs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_captured_steps_and_side_streams_change_no_bit(algorithm: dict[str, Any]) -> None:
    settings = MLA | algorithm | {"min_sparse_context": 60}
    plain, outs = Simulator(**settings, checked=False), []
    replaying = ReplayingSimulator(**settings, side_streams=DelayedStreams("late"))
    for sim in (plain, replaying):
        a, b = sim.request(1, 150, seed=5), sim.request(2, 150, seed=6)
        steps = [*sim.prefill((a, 70), (b, 41)), *sim.prefill((b, 25))]
        outs.append(torch.cat([*steps, *(sim.decode(a, b) for _ in range(25))], dim=1))
    assert torch.equal(*outs)
    assert_same(state_of(replaying), state_of(plain))
    assert replaying.num_replayed > 0


def test_bytes_are_those_of_the_format() -> None:
    sim = Simulator(**MLA)
    host, device = sim.manager.host, sim.manager.device
    assert host.format.token_bytes == sim.layers * ROW_BYTES
    assert host.num_bytes == sim.host_pages * sim.page_size * host.format.token_bytes
    assert host.num_bytes == sum(host.layer(layer).k.nbytes for layer in range(sim.layers))
    assert device.page_bytes == sim.page_size * ROW_BYTES
    request = sim.request(1, 60, seed=1)
    sim.prefill((request, 50))
    sim.decode(request)
    assert sim.coordinator.stats().written_bytes == 51 * host.format.token_bytes


def deepseek(**changes: Any) -> KVSpec:
    shape = {"num_layers": 61, "num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576}
    shape |= {"v_head_dim": 512, "page_size": 16, "dtype": torch.bfloat16, "latent": True}
    return KVSpec(**shape | {"kv_cache_dtype": "fp8_e4m3"} | changes)


def test_deepseek_takes_656_bytes_a_token_and_layer() -> None:
    stored = format_of(deepseek())
    assert stored.layer_token_bytes == 656
    assert stored.decoded_token_bytes == 576 * 2
    assert stored.dense_token_bytes == 61 * 576, "SGLang's own fp8 latents have no scales"
    indexed = format_of(deepseek(index_head_dim=128))
    assert indexed.dense_token_bytes == indexed.token_bytes, "but those of DeepSeek-V3.2"


def test_what_is_allocated_is_what_was_sized() -> None:
    config = HiSparseConfig(budget=256, page_size=16, kv_cache_dtype="fp8_e4m3")
    resources = Resources(
        host_bytes=4 << 20,
        device_bytes=8 << 20,
        context_length=4096,
        max_requests=4,
        device_type="cpu",
    )
    spec = deepseek(num_layers=2, num_q_heads=4, head_dim=80, v_head_dim=64)
    setup = resolve(config, spec, 0.1, resources)
    sizing = setup.sizing
    host = HostKVPool(spec, sizing.kv_tokens // 16 + 1, setup.resolved.layout, pin=False)
    device = torch.device("cpu")
    slots = sizing.max_requests + 1
    manager = build_engine(setup, host, num_slots=slots, device=device).manager
    assert manager.device.num_bytes == sizing.num_device_pages * 16 * 112 * 2
    assert manager.staging_bytes <= sizing.staging_bytes
    # A selection of 15 pages and the tail page, decoded.
    assert sizing.workspace_bytes == sizing.max_requests * 16 * 16 * 80 * 2


def test_another_format_in_a_store_is_another_key() -> None:
    """Pages move to a store and back as they are."""
    formats = set()
    for dtype in ("auto", "fp8_e4m3"):
        sims = [Simulator(**MLA | {"kv_cache_dtype": dtype}) for _ in range(2)]
        request = sims[0].request(1, 60, seed=1)
        sims[0].prefill((request, 48))
        pages = torch.tensor(request.host_pages)
        stores = [PageSerializer(sim.manager.host, sim.page_size, {}) for sim in sims]
        data = torch.empty(len(pages), stores[0].record_bytes, dtype=torch.uint8)
        stores[0].read(pages, data)
        stores[1].write(pages, data)
        for layer in range(2):
            one, other = (sim.manager.host.layer(layer).k[pages] for sim in sims)
            assert torch.equal(one, other)
        formats.add(stores[0].describe())
    assert len(formats) == 2
