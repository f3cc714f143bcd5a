"""Selections of single built-in algorithms; test_contract.py tests what they have in common."""

from __future__ import annotations

import pytest
import torch

from hisparse.algorithms import BaseSparseAlgorithm, DecodeStep
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.streaming import Streaming
from hisparse.testing import Simulator
from hisparse.types import Selection

SCOPES = ["layer", "kv_head", "query_head"]


class Watched:
    """Records every selection of an algorithm with its step and queries."""

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
