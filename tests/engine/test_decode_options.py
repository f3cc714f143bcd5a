"""``tail_estimate`` and ``reuse_layers`` on the real coordinator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms.quest import Quest
from hisparse.testing import Request, Simulator
from hisparse.testing.recorder import Recorder, Retrieved

SCOPES = ["layer", "kv_head", "query_head"]
LATENT = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}


def estimated(sim: Simulator, request: Request, seen: Retrieved, row: int) -> Tensor:
    """Float64 attention of the last token over the selected pages, the tail, and one mean key and
    value, with the weight of a page, for every other page.
    """
    size, layer, last = sim.page_size, seen.layer_id, seen.seq_lens[row] - 1
    count, group = last // size, sim.spec.group_size
    outs = []
    for q_head in range(sim.spec.num_q_heads):
        chosen = seen.pages[row][q_head * sim.policy.heads // sim.spec.num_q_heads]
        keys, values, weights = [], [], []
        for page in range(count + 1):
            own = slice(page * size, min((page + 1) * size, last + 1))
            k, v = (x[layer, own, q_head // group].double() for x in (request.k, request.v))
            if page == count or page in chosen:
                keys, values = [*keys, *k], [*values, *v]
                weights += [0.0] * len(k)
            else:
                keys, values = [*keys, k.mean(0)], [*values, v.mean(0)]
                weights += [math.log(size)]
        q = request.q[layer, last, q_head].double()
        logits = torch.stack(keys) @ q * sim.policy.scale + torch.tensor(weights).double()
        outs.append(logits.softmax(0) @ torch.stack(values))
    return torch.stack(outs).float()


@pytest.mark.parametrize(
    "shape", [*({"scope": scope} for scope in SCOPES), LATENT], ids=[*SCOPES, "latent"]
)
def test_a_tail_estimate_is_a_mean_token_for_every_other_page(shape: dict[str, Any]) -> None:
    """Pages of prefill, of decoding, and of a context that is all selected."""
    recorder = Recorder(Quest())
    sim = Simulator(**shape, algorithm=recorder, extensions={"tail_estimate": True})
    state = sim.coordinator.representations.tensors
    means = [name for name in state if name.startswith("tail_estimate")]
    assert len(means) == (1 if sim.latent_rank else 2), "a latent's mean is kept once"
    long, short = sim.request(1, 180, seed=1), sim.request(2, 40, seed=2)
    sim.prefill((long, 61))
    sim.prefill((long, 64), (short, 10))
    for _ in range(20):
        before = len(recorder.retrieved)
        outs = sim.decode(long, short)
        for out, seen in zip(outs, recorder.retrieved[before:], strict=True):
            for row, request in enumerate((long, short)):
                assert_close(out[row], estimated(sim, request, seen, row), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", SCOPES)
def test_equal_keys_in_a_page_make_the_estimate_exact(scope: str) -> None:
    sim = Simulator(scope=scope, extensions={"tail_estimate": True})
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
