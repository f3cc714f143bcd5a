"""Every built-in algorithm under the real coordinator, and what each one keeps."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm, Oracle, Streaming
from hisparse.batch import DecodeStep
from hisparse.types import Selection
from hisparse.testing import Simulator

SCOPES = ["layer", "kv_head", "query_head"]
BUILT_IN = ["oracle", "quest", "streaming"]


class Watched:
    """Keeps every selection of an algorithm, with the step and the queries it was made for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cls: type[BaseSparseAlgorithm]) -> None:
        self.seen: list[tuple[int, torch.Tensor, DecodeStep, Selection]] = []
        right = cls.retrieve_topk

        def retrieve(
            algorithm: BaseSparseAlgorithm, queries: torch.Tensor, layer: int, step: DecodeStep
        ) -> Selection:
            selection = right(algorithm, queries, layer, step)
            self.seen.append((layer, queries, step, selection))
            return selection

        monkeypatch.setattr(cls, "retrieve_topk", retrieve)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_budget_of_the_whole_context_is_dense(name: str, scope: str) -> None:
    sim = Simulator(
        scope=scope, budget=96, device_buffer=96, max_row=96, algorithm=ALGORITHMS.get(name)()
    )
    request = sim.request(1, 90, seed=0)
    sim.prefill((request, 61))
    for _ in range(29):
        out = sim.decode(request)
        expected = sim.dense(request, request.done - 1, request.done).float()
        assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_others_in_the_batch_and_chunks_change_nothing(name: str, scope: str) -> None:
    """The coordinator checks every selection, and every resident byte, on the way."""
    outs = []
    for chunks, others in (((100,), 0), ((40, 37, 23), 0), ((100,), 2)):
        sim = Simulator(scope=scope, algorithm=ALGORITHMS.get(name)())
        request = sim.request(1, 140, seed=5)
        for chunk in chunks:
            sim.prefill((request, chunk))
        beside = [sim.request(slot, 170, seed=slot) for slot in range(2, 2 + others)]
        for other in beside:
            sim.prefill((other, 20 + 60 * (other.slot - 2)))
        outs.append(torch.cat([sim.decode(request, *beside)[:, :1] for _ in range(30)]))
    for out in outs[1:]:
        assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


def test_streaming_keeps_sinks_and_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, Streaming)
    sim = Simulator(algorithm=Streaming(), budget=48)
    long, short = sim.request(1, 140, seed=1), sim.request(2, 60, seed=2)
    sim.prefill((long, 100), (short, 30))
    for _ in range(10):
        sim.decode(long, short)
    for _, _, step, (pages, lengths) in watched.seen:
        for row, count in enumerate(step.num_pages.tolist()):
            expected = [0, *range(count - 4, count)] if count > 5 else list(range(count))
            for head in range(2):
                assert lengths[row, head] == len(expected)
                assert pages[row, head].tolist() == expected + [-1] * (5 - len(expected))


@pytest.mark.parametrize("scope", SCOPES)
def test_the_oracle_keeps_the_pages_with_the_most_mass(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, Oracle)
    sim = Simulator(scope=scope, algorithm=Oracle(), budget=48)
    request = sim.request(1, 140, seed=3)
    sim.prefill((request, 120))
    for _ in range(5):
        sim.decode(request)
    size, group = sim.page_size, sim.spec.group_size
    for layer, queries, step, (pages, _) in watched.seen:
        count = int(step.num_pages[0])
        keys = request.k[layer, : count * size].double().repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,khd->hk", queries[0].double(), keys) * sim.policy.scale
        mass = logits.softmax(-1).unflatten(1, (count, size)).sum(-1)
        for head, chosen in enumerate(pages[0].tolist()):
            heads = pages.shape[1]
            shared = mass[head * 4 // heads : (head + 1) * 4 // heads].sum(0)
            shared[[0, count - 1]] = torch.inf
            assert chosen == sorted(shared.topk(5).indices.tolist())
