"""Layers with a sliding window attend exactly their last tokens, whatever others select."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.algorithms import ALGORITHMS, build_algorithm
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.build import resolve
from hisparse.engine.capabilities import row_tokens
from hisparse.errors import ConfigError
from hisparse.testing import Simulator
from hisparse.testing.recording import ReplayingSimulator
from hisparse.trace import SelectionTrace
from hisparse.types import KVSpec
from tests.engine.test_invariants import assert_dense
from tests.shapes import TWO_LAYERS, machine
from tests.sizes import SWEEPS

#: Tokens: below, at and above a page of 8, over several pages, and beyond every context below.
WINDOWS = [1, 3, 8, 9, 20, 500]
_ROOMY = {"budget": 96, "device_buffer": 96, "max_row": 96}
_LAYERS = {"layers": 4, "checked": True}


def _run(sim: Simulator, chunks: Mapping[int, list[int]], steps: int, layers: Any = ...) -> None:
    """Prefill requests in chunks, decode them together, and compare every output."""
    layers = slice(None) if layers is ... else layers
    requests = {s: sim.request(s, sum(n) + steps, seed=s) for s, n in chunks.items()}
    for step in range(max(map(len, chunks.values()))):
        parts = [(requests[s], n[step]) for s, n in chunks.items() if step < len(n)]
        for (request, n), out in zip(parts, sim.prefill(*parts), strict=True):
            assert_dense(sim, out, request, n, layers)
    for _ in range(steps):
        out = sim.decode(*requests.values())
        for row, request in enumerate(requests.values()):
            assert_dense(sim, out[:, [row]], request, 1, layers)


@pytest.mark.parametrize(
    ("window", "scope"),
    [
        (window, scope)
        for window in WINDOWS
        for scope in ("layer", "kv_head", "query_head")
        if SWEEPS or scope == "kv_head" or window == 9
    ],
)
def test_a_budget_of_the_whole_context_is_the_dense_model(window: int, scope: Any) -> None:
    """Chunks end within pages, staging has three pages, and the requests differ in length."""
    windows = (window, 0, window, 5)
    sim = Simulator(**_LAYERS, **_ROOMY, scope=scope, windows=windows)
    _run(sim, {1: [29, 2, 30], 2: [7, 12, 33, 4], 3: [1]}, steps=14)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"kv_cache_dtype": "fp8_e4m3"}, id="fp8"),
        pytest.param({"logit_cap": 2.0, "scale": 1.5}, id="cap"),
        pytest.param({"q_heads": 5, "kv_heads": 1, "scope": "layer"}, id="mqa"),
        pytest.param({"page_size": 1, "num_recent_pages": 2, "host_pages": 600}, id="tokens"),
        pytest.param({"min_sparse_context": 1000, "max_row": 40}, id="staged"),
        pytest.param({"min_sparse_context": 1000}, id="resident"),
        pytest.param({"dense_layers": (0, 1, 3), "max_row": 40}, id="dense layers"),
        pytest.param({"algorithm": ALGORITHMS.get("dipr")()}, id="dipr"),
    ],
)
def test_windows_beside_other_settings(settings: dict[str, Any]) -> None:
    """Layers with a window are exact with a budget of a third of the context, too."""
    small = {"budget": 32, "device_buffer": 40, "max_row": 64}
    sim = Simulator(**_LAYERS | small | settings, windows=(20, 0, 9, 33))
    _run(sim, {1: [50, 41], 2: [61, 3]}, steps=20, layers=[0, 2, 3])


def test_sinks_take_their_share_in_every_mode() -> None:
    for settings in ({"max_row": 40, "device_buffer": 40}, {}):
        sim = Simulator(**_LAYERS, windows=(20, 0, 0, 33), min_sparse_context=1000, **settings)
        sim.sinks = torch.randn(4, sim.q_heads, generator=torch.Generator().manual_seed(5))
        _run(sim, {1: [50, 21], 2: [30]}, steps=10)
    sparse = Simulator(**_LAYERS, **_ROOMY, windows=(20, 0, 0, 33))
    sparse.sinks = sim.sinks
    _run(sparse, {1: [50, 21], 2: [30]}, steps=10)


@pytest.mark.parametrize("window", [1, 9, 20])
def test_replayed_steps_hold_the_window(window: int) -> None:
    sim = ReplayingSimulator(layers=2, **_ROOMY, windows=(window, 0))
    _run(sim, {1: [40], 2: [3], 3: [1]}, steps=30)
    assert sim.num_replayed == 30


def test_a_prefix_of_the_radix_cache_is_read_up_to_the_window() -> None:
    """The second request's rows are empty: what it has to read is its windows and no more."""
    sim = Simulator(**_LAYERS, **_ROOMY, windows=(20, 9, 20, 9))
    first = sim.request(1, 90, seed=1)
    sim.prefill((first, 80))
    second = sim.request(2, 90, seed=2, like=first, shared=64)
    (out,) = sim.prefill((second, 10))
    assert_dense(sim, out, second, 10)
    # For attention, pages 5 to 7 and page 7 of the prefix; for decoding, pages 6 and 7 and none.
    num_pages = 2 * (3 + 1) + 2 * 2
    read = sim.manager.counters.totals()["prefill_read_bytes"]
    assert read == num_pages * sim.page_size * format_of(sim.spec).layer_token_bytes
    for _ in range(16):
        assert_dense(sim, sim.decode(second), second, 1)
    assert not sim.manager.counters.totals()["miss_pages"], "decoding reads no host memory"


def test_layers_with_a_window_have_no_representations() -> None:
    windows = (20, 0, 20, 20, 0, 0)
    sim = Simulator(layers=6, windows=windows, reuse_layers=2)
    seen: list[int] = []
    sim.coordinator.observe(lambda layer, *_: seen.append(layer))
    _run(sim, {1: [120], 2: [60, 60]}, steps=20, layers=[0, 2, 3])
    assert sorted(set(seen)) == [1, 5], "groups are of layers that attend the whole context"
    plain = Simulator(layers=6)
    kept, full = (x.representations.num_bytes("device") for x in (sim, plain))
    assert 2 * kept == full
    assert sim.representations.read(0, 1, torch.tensor([1])) == {}
    assert sim.representations.read(1, 1, torch.tensor([1]))


def test_state_that_skips_layers_is_a_tensor() -> None:
    """A plug-in may give it to any function of PyTorch."""
    sim = Simulator(layers=4, windows=(9, 0, 9, 0))
    (state,) = sim.coordinator.representations.tensors.values()
    assert isinstance(state, torch.Tensor) and torch.zeros_like(state).shape == state.shape
    assert len(state) == 2, "of layers 1 and 3"
    assert repr(state).startswith("tensor(")
    state[3] = 7
    assert (state[3] == 7).all() and (torch.stack(list(state))[1] == 7).all()
    state[3, torch.tensor([5])] = 8
    assert state[3, 5].eq(8).all() and state[3, 4].eq(7).all() and not state[1].eq(8).all()
    with pytest.raises(KeyError):
        state[0]


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"dsa", "infllm", "msa", "qsa"}))
def test_every_algorithm_selects_as_without_the_other_layers(algorithm: str) -> None:
    """Two layers among windows select what they select in a model of their own."""
    chosen = build_algorithm(HiSparseConfig(algorithm=algorithm))
    many = Simulator(layers=4, windows=(9, 0, 9, 0), algorithm=chosen)
    few = Simulator(layers=2, algorithm=chosen)
    a, b = (sim.request(1, 150, seed=3) for sim in (many, few))
    for name in ("q", "k", "v"):
        setattr(b, name, getattr(a, name)[[1, 3]])
    outs = []
    for sim, request in ((many, a), (few, b)):
        sim.prefill((request, 100))
        sim.prefill((request, 30))
        outs.append(torch.stack([sim.decode(request) for _ in range(20)]))
    assert torch.equal(outs[0][:, [1, 3]], outs[1])


def test_a_trace_has_the_layers_that_select(tmp_path: Path) -> None:
    file = tmp_path / "steps.trace"
    sim = Simulator(layers=4, windows=(9, 0, 9, 0), extensions={"trace": {"path": str(file)}})
    request = sim.request(1, 120, seed=1)
    sim.prefill((request, 100))
    for _ in range(10):
        sim.decode(request)
    (extension,) = sim.coordinator.extensions.values()
    extension.close()
    trace = SelectionTrace(file)
    assert trace.header.layers == (1, 3)
    assert len(trace.seq_lens) == 10


def _spec(windows: tuple[int, ...]) -> KVSpec:
    return replace(TWO_LAYERS, num_layers=4, dtype=torch.float32, windows=windows)


def test_rows_hold_the_widest_window() -> None:
    spec = _spec((0, 100, 700, 0))
    assert row_tokens(HiSparseConfig(budget=256), spec) == 704
    assert row_tokens(HiSparseConfig(budget=512), spec) == 1024
    config = HiSparseConfig(budget=256, max_row_capacity=512)
    with pytest.raises(ConfigError, match=r"max_row_capacity: got 512, expected at least 704"):
        row_tokens(config, spec)


def test_the_sizing_pays_for_representations_of_full_layers_alone() -> None:
    config = HiSparseConfig(budget=256)
    mixed, full, windows = (
        resolve(config, _spec(each), 0.125, machine())
        for each in ((0, 100, 100, 100), (), (100,) * 4)
    )
    page = full.sizing.request.representation_page_bytes
    assert mixed.sizing.request.representation_page_bytes * 4 == page
    assert windows.sizing.request.representation_page_bytes == 0
    assert mixed.sizing.request.kv_token_bytes == full.sizing.request.kv_token_bytes
