"""The option ``economy`` of sketch: candidates by outlines, sketches in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep, Representation, build_algorithm, entry_bytes
from hisparse.algorithms.sketch import Sketch
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.plan.fit import Machine, fit
from hisparse.testing import Simulator, cases_of, run_checks
from hisparse.types import Selection
from tests.shapes import LLAMA, TOKEN_BYTES

GIB = 1 << 30
SCOPES = ["query_head", "kv_head", "layer"]


@dataclass(frozen=True, kw_only=True)
class Economy(Sketch):
    """Keeps the pages with the most attention; economical by default."""

    economy: bool = True


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates for each page, so that short contexts have more pages than candidates."""
    monkeypatch.setattr(Sketch, "host_candidates", 2)


@pytest.mark.usefixtures("few_candidates")
def test_contract() -> None:
    cases = [case for case in cases_of(Economy) if case.page_size == 8]
    results = list(run_checks(Economy, cases))
    assert [r for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("scope", SCOPES)
def test_candidates_that_are_all_pages_change_nothing(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Selection, Selection]] = []

    @dataclass(frozen=True, kw_only=True)
    class Both(Economy):
        """Selects in both ways."""

        def _select(self, query: Tensor, layer_id: int, step: DecodeStep) -> Selection:
            default = replace(self, economy=False)
            expected = Sketch._select(default, query, layer_id, step)
            monkeypatch.setattr(Sketch, "host_candidates", 100)
            seen.append((expected, self._select_candidates(query, layer_id, step)))
            return expected

    sim = Simulator(scope=scope, algorithm=Both(), budget=48)
    first, second = sim.request(1, 190, seed=4), sim.request(2, 190, seed=5)
    sim.prefill((first, 180), (second, 101))
    for _ in range(5):
        sim.decode(first, second)
    assert len(seen) >= 5 * sim.layers
    for expected, got in seen:
        assert torch.equal(got.pages, expected.pages)
        assert torch.equal(got.lengths, expected.lengths)


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("scope", SCOPES)
def test_the_page_that_a_query_looks_for_is_found(scope: str) -> None:
    """Among far more pages than candidates, by each head of a selection its own."""
    torch.manual_seed(0)
    sim = Simulator(scope=scope, algorithm=Economy(), budget=48, host_pages=200)
    size, pages = sim.page_size, 80
    request = sim.request(1, (pages + 2) * size, seed=6)
    wanted = [11, 37]
    for head, page in enumerate(wanted):
        request.k[:, page * size : (page + 1) * size, head] *= 0.1
        request.k[:, page * size : (page + 1) * size, head, :4] += 6
    request.q[:, pages * size :, :, :4] += 6
    seen: list[Tensor] = []
    sim.coordinator.observe(lambda layer, q, step, chosen: seen.append(chosen.pages))
    sim.prefill((request, pages * size))
    for _ in range(4):
        sim.decode(request)
    heads = sim.policy.heads
    for chosen in seen:
        for h in range(heads):
            kv_heads = wanted if heads == 1 else [wanted[h * 2 // heads]]
            assert set(kv_heads) <= set(chosen[0, h].tolist())


def test_two_percent_on_the_device_and_the_rest_in_host_memory() -> None:
    machine = Machine(
        device_bytes=141 * GIB,
        host_bytes=4096 * GIB,
        tp=1,
        weight_bytes=16 * GIB,
        mem_fraction=0.85,
    )
    default, economy = (
        fit(HiSparseConfig(algorithm_config={"economy": on}, budget=2048), LLAMA, machine, 131072)
        for on in (False, True)
    )
    key_bytes = TOKEN_BYTES // 2
    # A GPU's page tables for registered host memory are not what an algorithm keeps.
    outline, sketch = (
        found.device_bytes_per_token - found.host_bytes_per_token // 512
        for found in (economy, default)
    )
    assert outline <= 0.02 * key_bytes < sketch
    # What the default keeps on the device lies in host memory.
    assert economy.host_bytes_per_token - default.host_bytes_per_token == sketch
    assert economy.max_requests > 1.15 * default.max_requests


def test_bytes_are_counted_where_they_lie() -> None:
    sim = Simulator(algorithm=Economy())
    found = sim.representations
    assert found.num_bytes("host") == found.tensors["sketch"].nbytes
    assert found.num_bytes("device") == found.tensors["outline"].nbytes


def test_only_pages_are_kept_in_host_memory() -> None:
    with pytest.raises(ValueError, match="memory: got 'host' for each request"):
        Representation((4,), torch.uint8, per="request", memory="host")
    kinds = {
        "a": Representation((4,), torch.float32),
        "b": Representation((3,), torch.uint8, memory="host"),
    }
    assert (entry_bytes(kinds, "page"), entry_bytes(kinds, "page", "host")) == (16, 3)


def test_it_is_on_or_off() -> None:
    config = HiSparseConfig(algorithm_config={"economy": 4})
    with pytest.raises(ConfigError) as error:
        build_algorithm(config)
    assert str(error.value) == "algorithm_config.economy: got 4 (int), expected true or false"
