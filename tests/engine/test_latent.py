"""MLA: one stored latent per token is its key and, in its first columns, its value."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.testing import Simulator
from hisparse.types import HostLayout

MLA = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
@pytest.mark.parametrize(
    ("algorithm", "page_size"),
    [(Sketch(), 8), (Quest(), 8), (DSA(), 1)],
    ids=["sketch", "quest", "dsa"],
)
def test_a_budget_of_the_whole_context_is_dense(
    algorithm: BaseSparseAlgorithm, page_size: int, layout: HostLayout
) -> None:
    sim = Simulator(
        **MLA,
        layout=layout,
        algorithm=algorithm,
        page_size=page_size,
        budget=96,
        device_buffer=96,
        max_row=96,
        host_pages=400,
    )
    request = sim.request(1, 90, seed=0)
    for chunk in (29, 32):
        start = request.done
        (out,) = sim.prefill((request, chunk))
        assert_close(out, sim.dense(request, start, request.done).float(), rtol=1e-4, atol=1e-5)
    for _ in range(29):
        out = sim.decode(request)
        expected = sim.dense(request, request.done - 1, request.done).float()
        assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_sparse_steps_attend_the_pages_that_were_chosen() -> None:
    """A small buffer forces swaps; the manager compares every resident byte."""
    outs = []
    for device_buffer in (32, 128):
        sim = Simulator(**MLA, algorithm=Oracle(), device_buffer=device_buffer, max_row=128)
        first, second = sim.request(1, 180, seed=1), sim.request(2, 180, seed=2)
        sim.prefill((first, 120), (second, 77))
        outs.append(torch.stack([sim.decode(first, second) for _ in range(40)]))
    assert_close(outs[0], outs[1])


def test_values_take_no_memory_of_their_own() -> None:
    sim = Simulator(**MLA)
    host, device, spec = sim.manager.host, sim.manager.device, sim.spec
    assert spec.token_bytes == sim.layers * 24 * 4
    assert host.num_bytes == sim.host_pages * sim.page_size * spec.token_bytes
    assert device.page_bytes == sim.page_size * 24 * 4
    for kv in (host.layer(1), device.layer(1)):
        assert kv.v.data_ptr() == kv.k.data_ptr()
        assert kv.v.shape[-1] == 16
