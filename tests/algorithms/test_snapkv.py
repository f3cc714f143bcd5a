"""SnapKV against votes counted by hand in float64."""

from __future__ import annotations

import pytest
import torch

from hisparse.algorithms.snapkv import SnapKV
from hisparse.testing import Request, Simulator
from hisparse.testing.recorder import Recorder

SCOPES = ["layer", "kv_head", "query_head"]


def recorded(scope: str, window: int, **settings: object) -> tuple[Simulator, Recorder]:
    recorder = Recorder(SnapKV(window=window))
    return Simulator(scope=scope, algorithm=recorder, **settings), recorder


def votes(sim: Simulator, request: Request, prompt: int, window: int, layer: int) -> torch.Tensor:
    """``[H, P]``: attention of the last queries to each full page, summed over queries."""
    size, heads = sim.page_size, sim.policy.heads
    q = request.q[layer, prompt - window : prompt].double()
    k = request.k[layer, :prompt].double().repeat_interleave(sim.spec.group_size, dim=1)
    logits = torch.einsum("whd,khd->hwk", q, k) * sim.policy.scale
    hidden = torch.arange(prompt) > torch.arange(prompt - window, prompt)[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(1)
    pages = prompt // size
    by_page = weights[:, : pages * size].unflatten(1, (pages, size)).sum(-1)
    return by_page.unflatten(0, (heads, -1)).sum(1)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("chunks", [(100,), (40, 37, 23), (60, 38, 2), (97, 1, 1, 1)], ids=str)
def test_the_last_queries_choose_whatever_the_chunks(scope: str, chunks: tuple[int, ...]) -> None:
    """Chunks shorter than the window, inside pages, and prefixes that stream through staging."""
    window = 10
    sim, recorder = recorded(scope, window)
    request = sim.request(1, 140, seed=3, prompt=100)
    for chunk in chunks:
        sim.prefill((request, chunk))
    sim.decode(request)
    for seen in recorder.retrieved:
        best = votes(sim, request, 100, window, seen.layer_id)
        for head, pages in enumerate(seen.pages[0]):
            # Sinks and recents are 1 page each, the budget holds 3 besides the tail page.
            ranked = [p for p in best[head].argsort(descending=True).tolist() if p not in (0, 11)]
            assert pages[:3] == sorted([0, ranked[0], 11])


def test_generated_pages_come_before_the_prompt_and_the_newest_before_all() -> None:
    sim, recorder = recorded("kv_head", 8, budget=64, device_buffer=64)
    request = sim.request(1, 200, seed=4, prompt=100)
    sim.prefill((request, 100))
    for _ in range(80):
        sim.decode(request)
    best = votes(sim, request, 100, 8, 0)
    for seen in recorder.retrieved:
        if seen.layer_id:
            continue
        (count,) = seen.num_pages
        generated = list(range(12, count))[-6:]
        for head, pages in enumerate(seen.pages[0]):
            forced = {0, count - 1, *generated}
            ranked = [p for p in best[head].argsort(descending=True).tolist() if p not in forced]
            assert pages == sorted([*forced, *ranked][:7] if len(forced) < 7 else forced)


def test_a_new_request_does_not_inherit_votes() -> None:
    outs = []
    for before in (False, True):
        sim, _ = recorded("kv_head", 8)
        if before:
            old = sim.request(1, 120, seed=9)
            sim.prefill((old, 110))
            sim.decode(old)
            sim.end(old)
        request = sim.request(1, 120, seed=10, prompt=100)
        sim.prefill((request, 4))
        sim.prefill((request, 96))
        outs.append(sim.decode(request))
    assert torch.equal(*outs)
