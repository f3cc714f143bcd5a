"""``miss: host``: the CPU attends missing pages in host memory, and nobody sees a difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms.quest import Quest
from hisparse.algorithms.topp import TopP
from hisparse.cache.staging import Staging
from hisparse.cache.swap_in import SwapIn
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_capabilities
from hisparse.errors import ConfigError, HiSparseError
from hisparse.testing import Simulator
from hisparse.testing.recording import ReplayingSimulator
from tests.engine.test_invariants import DENSE, LAYOUTS, STORED, assert_dense
from tests.engine.test_replay import REUSE, TIGHT, play

HOST: dict[str, Any] = {"miss": "host"}
SINKS = torch.linspace(-1, 3, 16).view(4, 4)
#: What else a layer does, beside the formats and scopes.
STEPS = [
    pytest.param(REUSE, id="reuse"),
    pytest.param(REUSE | TIGHT, id="reuse-tight"),
    pytest.param({"algorithm": TopP(mass=0.8)}, id="topp"),
    pytest.param({"extensions": {"tail_estimate": True}}, id="tail-estimate"),
    pytest.param({"min_sparse_context": 100, "dense_layers": (0,), "max_row": 64}, id="staged"),
    pytest.param(
        {"layers": 4, "windows": (20, 0, 0, 33), "logit_cap": 5.0, "sinks": SINKS}, id="windows"
    ),
]


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


@pytest.mark.parametrize("settings", [*STORED, *STEPS])
def test_outputs_are_those_of_transfer(settings: dict[str, Any]) -> None:
    """The step machine compares both with float64 attention over the selection."""
    sims = [Simulator(**settings | each) for each in ({}, HOST)]
    expected, got = [long_play(sim) for sim in sims]
    assert_near(got, expected)
    transfer, host = [sim.coordinator.stats() for sim in sims]
    assert transfer.away_pages == 0
    assert 0 < transfer.miss_pages <= host.miss_pages, "host loads no page that is away"
    assert 0 < host.away_pages <= host.miss_pages


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


def test_captured_steps_are_the_eager_ones() -> None:
    settings = HOST | {"min_sparse_context": 80}
    eager, replaying = Simulator(checked=False, **settings), ReplayingSimulator(**settings)
    expected, got = play(eager)[0], play(replaying)[0]
    assert replaying.num_replayed == len(got)
    assert_near(got, expected)


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


def test_a_gpu_cannot_do_it_yet() -> None:
    config = HiSparseConfig(miss="host")
    check_capabilities(config, "cpu")
    with pytest.raises(ConfigError, match='miss: got "host" on device cuda, expected "transfer"'):
        check_capabilities(config, "cuda")
