"""The libraries' adapters return the results of ``torch`` in the coordinator."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

from hisparse.adapters import ADAPTERS
from hisparse.testing import Simulator
from tests.adapters.interpreter import Interpreter

SETTINGS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "layer-scope": {"scope": "layer"},
    "query-head-scope": {"scope": "query_head"},
    "tail-estimate": {"extensions": {"tail_estimate": True}},
    "tail-estimate-layer": {"scope": "layer", "extensions": {"tail_estimate": True}},
    "resident": {"min_sparse_context": 1000},
    "staged": {"min_sparse_context": 1000, "max_row": 64},
    "latent": {"kv_heads": 1, "head_dim": 40, "latent_rank": 32},
}
PAIRS = [
    pytest.param(name, settings, id=f"{name}-{key}")
    for name in ("flash_attention", "flashinfer")
    for key, settings in SETTINGS.items()
    if ("MLA" if "latent_rank" in settings else "GQA") in ADAPTERS.get(name).attention
]


@pytest.mark.parametrize(("name", "settings"), PAIRS)
def test_decoding_is_as_with_torch(
    interpreter: Interpreter, name: str, settings: dict[str, Any]
) -> None:
    adapters = (ADAPTERS.get(name)(), ADAPTERS.get("torch")())
    sims = [Simulator(adapter=adapter, **settings) for adapter in adapters]
    requests = [(sim.request(1, 120, seed=2), sim.request(2, 100, seed=3)) for sim in sims]
    for sim, (a, b) in zip(sims, requests, strict=True):
        sim.prefill((a, 90), (b, 61))
    for _ in range(10):
        got, expected = (sim.decode(*pair) for sim, pair in zip(sims, requests, strict=True))
        assert_close(got, expected, rtol=1e-4, atol=1e-5)
