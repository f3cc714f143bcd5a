"""What the engine computes in every format, with random K/V in place of a model.

Values that are read back count: K and V may be stored in fewer bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.cache.formats import format_of
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import ReplayingSimulator
from tests.delayed import DelayedStream
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
    "latents-dipr": MLA | {"algorithm": DIPR(alpha=0.5)},
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


@pytest.mark.parametrize("settings", FP8_LATENTS.values(), ids=FP8_LATENTS)
def test_captured_steps_and_side_work_change_no_bit(settings: dict[str, Any]) -> None:
    settings = settings | {"min_sparse_context": 60}
    plain, outs = Simulator(**settings, checked=False), []
    replaying = ReplayingSimulator(**settings, aside=DelayedStream("late"))
    for sim in (plain, replaying):
        a, b = sim.request(1, 150, seed=5), sim.request(2, 150, seed=6)
        steps = [*sim.prefill((a, 70), (b, 41)), *sim.prefill((b, 25))]
        outs.append(torch.cat([*steps, *(sim.decode(a, b) for _ in range(25))], dim=1))
    assert torch.equal(*outs)
    assert_same(state_of(replaying), state_of(plain))
    assert replaying.num_replayed > 0


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
        loaded = sim.coordinator.stats().miss_pages - before
        if sim is not sims[1]:
            assert 0 < loaded <= 5 * sim.policy.heads * sim.layers, "other pages stay resident"
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def _after_a_radix_hit(device_buffer: int) -> tuple[Simulator, Request]:
    """A request of 138 tokens, 128 of which another one computed; its row holds up to 256."""
    sim = Simulator(device_buffer=device_buffer, max_row=256)
    a = sim.request(1, 160, seed=12)
    sim.prefill((a, 128))
    b = sim.request(2, 160, seed=13, like=a, shared=128)
    sim.prefill((b, 10))
    return sim, b


def test_a_radix_hit_leaves_a_warm_row_behind() -> None:
    sim, hit = _after_a_radix_hit(device_buffer=256)
    for _ in range(20):
        sim.decode(hit)
    assert sim.coordinator.stats().decode_read_bytes == 0


def test_a_radix_hit_fills_the_smallest_row_at_most() -> None:
    """A larger row gets the rest when decode steps select it."""
    sim, hit = _after_a_radix_hit(device_buffer=64)
    prefix = 128 * sim.manager.host.format.layer_token_bytes * sim.layers
    assert sim.coordinator.stats().prefill_read_bytes == 1.5 * prefix
    sim.decode(hit)
