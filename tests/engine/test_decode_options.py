"""``tail_estimate`` and ``reuse_layers`` on the real coordinator."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing import assert_close

from hisparse.algorithms.quest import Quest
from hisparse.testing import Simulator
from hisparse.testing.recorder import Recorder

SCOPES = ["layer", "kv_head", "query_head"]
LATENT = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}


@pytest.mark.parametrize(
    "shape", [*({"scope": scope} for scope in SCOPES), LATENT], ids=[*SCOPES, "latent"]
)
def test_equal_keys_in_a_page_make_the_estimate_exact(shape: dict[str, Any]) -> None:
    sim = Simulator(**shape, extensions={"tail_estimate": True})
    means = [x for x in sim.coordinator.representations.tensors if x.startswith("tail_estimate")]
    assert len(means) == (1 if sim.latent_rank else 2), "a latent's mean is kept once"
    request = sim.request(1, 160, seed=3)
    for x in (request.k, request.v):
        pages = x.unflatten(1, (-1, sim.page_size))
        pages[:] = pages[:, :, :1].clone()
    sim.prefill((request, 120))
    for _ in range(20):
        out = sim.decode(request)
        expected = sim.dense(request, request.done - 1, request.done).float()
        assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [(), (0, 3)], ids=["sparse", "dense-leaders"])
def test_layers_of_a_group_share_the_selection_of_the_first(dense: tuple[int, ...]) -> None:
    recorder = Recorder(Quest())
    sim = Simulator(algorithm=recorder, layers=5, reuse_layers=2, dense_layers=dense)
    request = sim.request(1, 160, seed=4)
    sim.prefill((request, 120))
    out = sim.decode(request)[:, 0]
    leaders = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4} if not dense else {1: 1, 2: 2, 4: 4}
    assert [seen.layer_id for seen in recorder.retrieved] == sorted(set(leaders.values()))
    chosen = {seen.layer_id: seen.pages[0] for seen in recorder.retrieved}
    size, last = sim.page_size, request.done - 1
    for layer, leader in leaders.items():
        for q_head in range(4):
            pages = [*chosen[leader][q_head // 2], last // size]
            keep = [p * size + i for p in pages for i in range(size) if p * size + i <= last]
            k, v = (x[layer, keep, q_head // 2].double() for x in (request.k, request.v))
            weights = (k @ request.q[layer, last, q_head].double() * sim.policy.scale).softmax(0)
            assert_close(out[layer, q_head], (weights @ v).float(), rtol=1e-4, atol=1e-5)
