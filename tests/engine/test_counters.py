"""Sums of counters, and what is decided for each request."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hisparse.cache.counters import Counters
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import ReplayingSimulator


def test_a_refused_row_takes_nothing_from_the_pages_that_were_away() -> None:
    counters = Counters(torch.device("cpu"))
    for away in ([3, -1, 0], [-1, 2, 1]):
        counters.count("away_pages", torch.tensor(away, dtype=torch.int32))
    counters.count("capped_selections", torch.tensor([[True, False], [True, True]]))
    counters.publish()
    assert counters.totals() == {"away_pages": 6, "capped_selections": 3}


@pytest.mark.parametrize("kind", [Simulator, ReplayingSimulator])
@pytest.mark.parametrize("settings", [{}, {"min_sparse_context": 100}], ids=["budget", "dense"])
def test_each_choice_is_counted_once_a_request(
    kind: type[Simulator], settings: dict[str, int]
) -> None:
    """Requests grow beyond the budget, and beyond their device pages; one reuses a prefix."""
    sim = kind(max_row=64, **settings)
    got: list[tuple[int, str, int]] = []
    expected: list[tuple[int, str, int]] = []
    sim.coordinator.choices.observer = lambda *each: got.append(each)

    def decode(*requests: Request) -> None:
        sim.decode(*requests)
        for request in requests:
            pages = (request.done - 1) // sim.page_size
            held = sim.manager.residency.capacities.held[request.slot]
            choice = "resident" if pages <= held else "streamed"
            if pages >= sim.budget // sim.page_size and request.done > sim.min_sparse_context:
                choice = "sparse"
            if all(each[:2] != (request.slot, choice) for each in expected):
                expected.append((request.slot, choice, request.done))

    one, two = sim.request(1, 190, seed=1, prompt=75), sim.request(2, 60, seed=2)
    sim.prefill((one, 40), (two, 6))
    sim.prefill((one, 35))
    for _ in range(34):
        decode(one, two)
    three = sim.request(3, 190, seed=3, like=one, shared=64)
    expected.append((3, "reused", 64))
    sim.mixed([(three, 26)], one)
    sim.prefill((three, 10))
    decode(three, one)
    sim.end(one)
    before = list(expected)
    expected.clear()
    again = sim.request(1, 190, seed=4)
    sim.prefill((again, 110))
    decode(again)
    assert expected == [(1, "sparse", 111)], "a slot's next request is counted too"
    assert sorted(got) == sorted(before + expected)
    assert +Counter(sim.coordinator.stats().choices) == Counter(choice for _, choice, _ in got)
    names = {"resident", "sparse", "reused"} | ({"streamed"} if settings else set())
    assert {choice for _, choice, _ in got} == names
