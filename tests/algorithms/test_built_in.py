"""Selections of single built-in algorithms; test_contract.py tests what they have in common."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparse.algorithms import DecodeStep, build_algorithm
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.streaming import Streaming
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.testing import Simulator
from hisparse.types import Selection

SCOPES = ["layer", "kv_head", "query_head"]
Seen = tuple[int, torch.Tensor, DecodeStep, Selection]


def watch(sim: Simulator) -> list[Seen]:
    """A list that takes up each selection as it is made."""
    seen: list[Seen] = []
    sim.coordinator.observe(lambda *found: seen.append(found))
    return seen


def test_streaming_keeps_sinks_and_the_window() -> None:
    sim = Simulator(algorithm=Streaming(), budget=48)
    seen = watch(sim)
    long, short = sim.request(1, 140, seed=1), sim.request(2, 60, seed=2)
    sim.prefill((long, 100), (short, 30))
    for _ in range(10):
        sim.decode(long, short)
    for _, _, step, (pages, lengths) in seen:
        for row, count in enumerate(step.num_pages.tolist()):
            expected = [0, *range(count - 4, count)] if count > 5 else list(range(count))
            for head in range(2):
                assert lengths[row, head] == len(expected)
                assert pages[row, head].tolist() == expected + [-1] * (5 - len(expected))


@pytest.mark.parametrize("scope", SCOPES)
def test_the_oracle_keeps_the_pages_with_the_most_mass(scope: str) -> None:
    sim = Simulator(scope=scope, algorithm=Oracle(), budget=48)
    seen = watch(sim)
    request = sim.request(1, 140, seed=3)
    sim.prefill((request, 120))
    for _ in range(5):
        sim.decode(request)
    size, group = sim.page_size, sim.spec.group_size
    for layer, queries, step, (pages, _) in seen:
        count = int(step.num_pages[0])
        keys = request.k[layer, : count * size].double().repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,khd->hk", queries[0].double(), keys) * sim.policy.scale
        mass = logits.softmax(-1).unflatten(1, (count, size)).sum(-1)
        for head, chosen in enumerate(pages[0].tolist()):
            heads = pages.shape[1]
            shared = mass[head * 4 // heads : (head + 1) * 4 // heads].sum(0)
            shared[[0, count - 1]] = torch.inf
            assert chosen == sorted(shared.topk(5).indices.tolist())


@pytest.mark.parametrize(("sinks", "recents"), [(0, 0), (1, 2), (3, 0), (2, 9)])
def test_sinks_and_recents_are_the_first_and_the_last_full_pages(sinks: int, recents: int) -> None:
    policy = replace(Simulator().policy, num_sink_pages=sinks, num_recent_pages=recents)
    counts = [0, 1, 4, 7, 8]
    forced = policy.forced_pages(torch.tensor(counts, dtype=torch.int32), 8)
    for row, count in zip(forced.tolist(), counts, strict=True):
        pages = list(range(count))
        expected = {*pages[:sinks], *pages[max(0, count - recents) :]}
        assert {page for page, is_forced in enumerate(row) if is_forced} == expected


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("dipr", {"beta": 1.0, "alpha": 0.5}, "got beta 1.0 and alpha 0.5, expected one of them"),
        ("dipr", {"beta": 0.0}, "beta: got 0.0, expected more than 0 and finite"),
        ("dipr", {"beta": -2}, "beta: got -2, expected more than 0"),
        ("dipr", {"beta": math.inf}, "beta: got inf"),
        ("dipr", {"beta": math.nan}, "beta: got nan"),
        ("dipr", {"alpha": 0.0}, "alpha: got 0.0, expected more than 0 and less than 1"),
        ("dipr", {"alpha": 1.0}, "alpha: got 1.0"),
        ("snapkv", {"window": 0}, "window: got 0, expected at least 1 query"),
        ("sketch", {"detail": -0.1}, "detail: got -0.1, expected 0 to 1"),
        ("sketch", {"detail": 1.5}, "detail: got 1.5, expected 0 to 1"),
        ("quest", {"ranges": 0}, "ranges: got 0, expected at least 1"),
    ],
)
def test_options_are_checked(algorithm: str, options: dict[str, Any], message: str) -> None:
    config = HiSparseConfig(algorithm=algorithm, algorithm_config=options)
    with pytest.raises(ConfigError, match=message):
        build_algorithm(config)
