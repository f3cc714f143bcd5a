"""DIPR's fine index: results of the search, and the lifecycle of graphs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms.dipr import DIPR, fine
from hisparse.algorithms.request_indexes import RequestIndexes
from hisparse.errors import ConfigError
from hisparse.testing import Request, Simulator
from hisparse.testing.recorder import Recorder, Retrieved
from hisparse.testing.suite import CHECKS, cases_of, run_check


def simulator(algorithm: Any, **changes: Any) -> Simulator:
    world = {
        "page_size": 16,
        "budget": 64,
        "device_buffer": 1024,
        "max_row": 1024,
        "host_pages": 400,
        "staging_pages": 40,
        "num_slots": 3,
    }
    return Simulator(algorithm=algorithm, **(world | changes))


def cluster(request: Request, seed: int) -> None:
    """Keys in 150 clusters of different sizes; each query is close to a cluster."""
    rng = torch.Generator().manual_seed(seed)
    layers, length, heads, dim = request.k.shape
    centres = torch.randn(150, dim, generator=rng)
    odds = torch.rand(150, generator=rng) ** 3 + 1e-3

    def near(count: int, odds: Tensor) -> Tensor:
        which = torch.multinomial(odds, count, replacement=True, generator=rng)
        return centres[which] + 0.4 * torch.randn(count, dim, generator=rng)

    request.k.copy_(near(layers * length * heads, odds).view_as(request.k))
    request.q.copy_(2 * near(request.q[..., 0].numel(), torch.ones(150)).view_as(request.q))


def served(algorithm: DIPR, seed: int, **changes: Any) -> list[Retrieved]:
    """Selections of 20 steps after a prompt of 4,000 tokens."""
    recorder = Recorder(algorithm)
    sim = simulator(recorder, **changes)
    request = sim.request(1, 4020, seed=seed)
    cluster(request, seed)
    sim.prefill((request, 4000))
    for _ in range(20):
        sim.decode(request)
    return recorder.retrieved


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_search_finds_19_of_20_pages_and_looks_at_few(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[float] = []
    right = fine.graph_score

    def watched(*inputs: Any, **options: Any) -> Tensor:
        found = right(*inputs, **options)
        parts.append((found > -torch.inf).float().mean().item())
        return found

    monkeypatch.setattr(fine, "graph_score", watched)
    world: dict[str, Any] = {"page_size": page_size, "host_pages": 5000 // page_size}
    in_range, hits, others = 0, 0, 0
    for seed in range(2):
        flat = served(DIPR(alpha=0.01, index="flat"), seed, **world)
        found = served(DIPR(alpha=0.01, index="fine", capacity_threshold=64), seed, **world)
        for expected, got in zip(flat, found, strict=True):
            for a, b in zip(expected.pages[0], got.pages[0], strict=True):
                # Sink and recent page are found by no search.
                forced = {-1, 0, expected.num_pages[0] - 1}
                in_range += len(set(a) - forced)
                hits += len(set(a) & set(b) - forced)
                others += len(set(b) - set(a) - forced)
    assert in_range > 20 * 2 * 2 * 4
    assert hits >= 0.95 * in_range
    # Scores are exact: what else is kept is there because the best token was missed.
    assert others <= 0.05 * in_range
    if page_size == 1:
        assert max(parts) < 0.75
        assert sum(parts) / len(parts) < 0.4


def test_new_tokens_are_scanned_until_the_next_prompt_ends() -> None:
    recorder = Recorder(DIPR(alpha=0.01, index="fine", capacity_threshold=8))
    sim = simulator(recorder, num_recent_pages=0)
    request = sim.request(1, 700, seed=1, prompt=400)
    # Token 410 is what all later queries look for.
    needle = request.q[:, 410].unflatten(1, (2, -1)).mean(2)
    request.k[:, 410] = 9 * needle
    request.q[:, 411:] = needle.repeat_interleave(2, 1)[:, None]
    sim.prefill((request, 400))
    indexes = sim.representations.indexes
    assert indexes.lengths[:, 1].tolist() == [400, 400]
    for _ in range(40):
        sim.decode(request)
    later = [seen for seen in recorder.retrieved if seen.num_pages[0] > 25]
    assert later
    assert all(pages[:2] == [0, 25] for seen in later for pages in seen.pages[0])
    assert indexes.lengths[:, 1].tolist() == [400, 400]
    sim.prefill((request, 50))
    assert indexes.lengths[:, 1].tolist() == [480, 480]
    sim.decode(request)
    assert all(25 in pages for seen in recorder.retrieved[-2:] for pages in seen.pages[0])


def test_graphs_are_freed_with_their_requests() -> None:
    algorithm = DIPR(index="fine", capacity_threshold=4)
    sim = simulator(algorithm)
    indexes = sim.representations.indexes
    one, other = sim.request(1, 600, seed=1, prompt=500), sim.request(2, 300, seed=2)
    sim.prefill((one, 200))
    assert indexes.num_bytes == 0, "the prompt goes on"
    sim.prefill((one, 300), (other, 250))
    per_token = algorithm.host_token_bytes(sim.spec)
    assert indexes.num_bytes == per_token * (496 + 240)
    sim.representations.fork(1, 0)
    assert indexes.num_bytes == per_token * (496 + 240), "shared"
    sim.end(one)
    sim.decode(other)
    assert indexes.lengths[0].tolist() == [496, 0, 240]
    sim.coordinator.on_request_end(0)
    sim.end(other)
    third = sim.request(1, 100, seed=3)
    sim.prefill((third, 90))
    assert indexes.num_bytes == 0, "a search among 90 tokens is no less work than all of them"
    assert indexes.addresses.count_nonzero() == 0


def test_links_are_the_same_for_the_same_keys_and_lead_to_near_ones() -> None:
    rng = torch.Generator().manual_seed(0)
    # Two clusters, apart in direction: links stay within them.
    keys = torch.randn(600, 2, 16, generator=rng)
    keys[:, :, 0] += 30 * (torch.arange(600) % 2 * 2 - 1)[:, None]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(fine.link_keys(keys))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    links = found[0]
    assert links.shape == (2, 600, fine.LINKS_PER_TOKEN)
    assert links.dtype == torch.int32
    assert links.max() < 600
    there = links >= 0
    same = (links % 2) == (torch.arange(600) % 2)[:, None]
    assert there.any(-1).all()
    assert same[there].float().mean() > 0.95


@pytest.mark.parametrize("name", ["reused slot", "shared prefix", "chunks", "no syncs", "no loops"])
def test_contract(name: str) -> None:
    """``test_contract.py`` runs the flat index; this test builds graphs, also for short prompts."""

    def make() -> DIPR:
        return DIPR(index="fine", capacity_threshold=1)

    (check,) = [check for check in CHECKS if check.name == name]
    cases = [c for c in cases_of(make) if c.scope == "kv_head"]
    assert run_check(check, cases).message == ""


def test_faiss_is_asked_for_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match="'fine', which needs faiss .* or index flat"):
        Simulator(algorithm=DIPR(index="fine"))
    Simulator(algorithm=DIPR(index="flat"))


def test_indexes_that_do_not_fit_are_not_kept() -> None:
    """Requests with a common prefix share the memory limit of its tokens, not the graphs."""
    indexes = RequestIndexes(1, 3, max_bytes=100)
    indexes.put(0, 1, torch.zeros(15, dtype=torch.int32), 15)
    assert indexes.has_room(40)
    assert not indexes.has_room(41)
    indexes.fork(1, 2)
    assert indexes.has_room(40), "what is shared counts once"
    indexes.drop(1)
    indexes.drop(2)
    assert indexes.has_room(100)
