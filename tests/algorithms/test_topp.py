"""Twilight's top-p: the kept attention mass, and the number of pages."""

from __future__ import annotations

import pytest
import torch

from hisparse.algorithms.topp import TopP
from hisparse.testing import Request, Simulator
from hisparse.testing.recorder import Recorder

SCOPES = ["layer", "kv_head", "query_head"]


def shares(sim: Simulator, request: Request, layer: int, tokens: int) -> torch.Tensor:
    """``[H, P + 1]``: each page's part of the attention of the last token, the tail's at the end;
    of heads that share a selection the mean.
    """
    size, count = sim.page_size, (tokens - 1) // sim.page_size
    k = request.k[layer, :tokens].double().repeat_interleave(sim.spec.group_size, dim=1)
    logits = torch.einsum("hd,khd->hk", request.q[layer, tokens - 1].double(), k)
    weights = (logits * sim.policy.scale).softmax(-1)
    pages = weights[:, : count * size].unflatten(1, (count, size)).sum(-1)
    parts = torch.cat([pages, weights[:, count * size :].sum(-1, keepdim=True)], -1)
    return parts.unflatten(0, (sim.policy.heads, -1)).mean(1)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("mass", [0.5, 0.8])
def test_what_is_kept_holds_the_mass_and_no_page_more(scope: str, mass: float) -> None:
    recorder = Recorder(TopP(mass=mass))
    sim = Simulator(scope=scope, algorithm=recorder, budget=32, device_buffer=256, max_row=256)
    request = sim.request(1, 200, seed=3, prompt=180)
    sim.prefill((request, 180))
    for _ in range(15):
        sim.decode(request)
    numbers = set()
    for seen in recorder.retrieved:
        parts = shares(sim, request, seen.layer_id, seen.seq_lens[0])
        (count,) = seen.num_pages
        for head, length in enumerate(seen.lengths[0]):
            chosen = seen.pages[0][head][:length]
            kept = parts[head, [*chosen, count]].sum()
            free = [p for p in chosen if p not in (0, count - 1)]
            # 4-bit keys: estimates are off by a few percent.
            assert kept >= mass - 0.05
            if free:
                assert kept - parts[head, free].min() <= mass + 0.05
            numbers.add(length)
    assert len(numbers) > 2, "the number of pages follows the query"


def test_sharp_attention_keeps_few_pages_and_flat_attention_many() -> None:
    lengths = []
    for sharpness in (0.01, 8.0):
        recorder = Recorder(TopP(mass=0.9))
        sim = Simulator(algorithm=recorder, budget=32, device_buffer=256, max_row=256)
        request = sim.request(1, 200, seed=5, prompt=180)
        request.q *= sharpness
        sim.prefill((request, 180))
        sim.decode(request)
        lengths.append(torch.tensor([r.lengths for r in recorder.retrieved]).float().mean())
    flat, sharp = lengths
    assert flat > 18 > 6 > sharp


def test_the_cap_is_the_device_buffer() -> None:
    recorder = Recorder(TopP(mass=0.99))
    sim = Simulator(algorithm=recorder, budget=32, device_buffer=64)
    request = sim.request(1, 200, seed=6, prompt=180)
    request.q *= 0.01
    sim.prefill((request, 180))
    sim.decode(request)
    assert {n for r in recorder.retrieved for n in r.lengths[0]} == {64 // 8 - 1}
