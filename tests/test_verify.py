"""Drafts: each token is served as if it were decoded alone, and rejected ones leave no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.topp import TopP
from hisparse.engine.drafts import DraftTree
from hisparse.testing import Request
from tests.drafting import Draft, DraftingSimulator, random_draft
from tests.sizes import sized

LENGTH, PROMPTS, SLOTS = 150, (101, 60), (1, 3)
SMALL: dict[str, Any] = {"budget": 32, "device_buffer": 64, "max_row": 64, "page_size": 4}
TOKENS: dict[str, Any] = {
    "algorithm": DSA(),
    "scope": "layer",
    "kv_heads": 1,
    "head_dim": 24,
    "latent_rank": 16,
    "page_size": 1,
    "host_pages": 700,
    "num_sink_pages": 0,
    "num_recent_pages": 0,
}
#: Rows that hold all pages that drafts select, so that a run has many nodes.
ROOMY = {"device_buffer": 160, "max_row": 160}
SETTINGS = [
    pytest.param({}, id="sketch"),
    pytest.param({"algorithm": Quest(), "scope": "layer"}, id="quest"),
    pytest.param({"algorithm": Quest(), "scope": "query_head", "fp8": True}, id="quest-fp8"),
    pytest.param(TOKENS, id="dsa-latents"),
    pytest.param(TOKENS | {"fp8": True}, id="dsa-latents-fp8"),
    pytest.param({"algorithm": TopP(mass=0.8)}, id="topp"),
    pytest.param({"layers": 4, "reuse_layers": 2, "dense_layers": (1,)}, id="reuse-dense-layer"),
    pytest.param({"min_sparse_context": 105}, id="dense-and-sparse"),
    pytest.param({"min_sparse_context": 1000, "layout": "layer_first"}, id="staged"),
    pytest.param({"page_size": 2, "budget": 16}, id="drafts-fill-many-pages"),
    pytest.param({"layers": 4, "windows": (20, 0, 9, 33)}, id="windows-sinks"),
    pytest.param(ROOMY, id="rows-with-room-for-all-nodes"),
    pytest.param(ROOMY | {"page_size": 16, "budget": 64}, id="drafts-within-a-page"),
]


def simulator(settings: dict[str, Any]) -> tuple[DraftingSimulator, list[Request]]:
    """Two requests with their prompts, and host pages for all of their tokens."""
    sim = DraftingSimulator(**SMALL | settings)
    if "windows" in settings:
        sim.sinks = torch.linspace(-1, 3, sim.layers * 4).view(sim.layers, 4)
    requests = [
        sim.request(s, LENGTH, seed=s, prompt=n) for s, n in zip(SLOTS, PROMPTS, strict=True)
    ]
    for request in requests:
        sim.reserve(request, LENGTH + 16)
    sim.prefill(*zip(requests, PROMPTS, strict=True))
    return sim, requests


def bits(tensor: Tensor) -> Tensor:
    """The bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def assert_same_state(sim: DraftingSimulator, alone: DraftingSimulator) -> None:
    """LRU tables, representations, resident pages and tail pages are those of ``alone``."""
    one, two = sim.manager.device, alone.manager.device
    for name, a, b in zip(one.states._fields, one.states, two.states, strict=True):
        if a is not None:
            assert torch.equal(a, b), name
    assert torch.equal(one.capacity, two.capacity)
    assert torch.equal(one.tail_pages, two.tail_pages)
    for name, tensor in sim.representations.of_pages.items():
        other = alone.representations.of_pages[name]
        # Not those of the padding page.
        assert torch.equal(bits(tensor[:, 1:]), bits(other[:, 1:])), name
    for layer in range(sim.layers):
        pages = one.states.device_pages[layer][one.states.slot_pages[layer] >= 0].long()
        for a, b in zip(one.stored(layer).tensors, two.stored(layer).tensors, strict=True):
            assert torch.equal(bits(a[pages]), bits(b[pages])), f"resident pages, layer {layer}"


def assert_same_tokens(
    sim: DraftingSimulator, alone: DraftingSimulator, requests: list[Request]
) -> None:
    """K and V of all computed tokens are equal, in host memory and in the tail pages."""
    size, heads = sim.page_size, sim.policy.heads
    for layer in range(sim.layers):
        for request in requests:
            pages, count = request.host_pages, request.done
            slots = torch.tensor([pages[i // size] * size + i % size for i in range(count)])
            host = (s.manager.kv_io.read_stored(layer, slots) for s in (sim, alone))
            for a, b in zip(*(stored.tensors for stored in host), strict=True):
                assert torch.equal(bits(a), bits(b)), "host memory"
            rows = slice(request.slot * heads, (request.slot + 1) * heads)
            tails = sim.manager.device.tail_pages[layer, rows].long()
            stored = (s.manager.device.stored(layer) for s in (sim, alone))
            for a, b in zip(*(each.tensors for each in stored), strict=True):
                filled = (..., slice(count % size), slice(None))
                assert torch.equal(bits(a[tails][filled]), bits(b[tails][filled])), "tail pages"


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(sized(1, 25)))
def test_accepted_drafts_equal_decoding_one_token_at_a_time(
    settings: dict[str, Any], seed: int
) -> None:
    sim, requests = simulator(settings)
    alone, twins = simulator(settings)
    others = [alone.request(4, LENGTH, seed=50 + seed) for _ in requests]
    alone.end(others[0])
    rng = random.Random(seed)
    for _ in range(4):
        drafts = [random_draft(r, o, 7, rng) for r, o in zip(requests, others, strict=True)]
        before = [r.done for r in requests]
        out = sim.verify(*drafts)
        paths = [draft.path(draft.accepted) for draft in drafts]
        for depth in range(max(map(len, paths))):
            some = [b for b, path in enumerate(paths) if depth < len(path)]
            expected = alone.decode(*(twins[b] for b in some))
            found = torch.stack([out[:, b, paths[b][depth]] for b in some], 1)
            assert torch.equal(found, expected), (before, depth)
        assert_same_tokens(sim, alone, requests)
        assert_same_state(sim, alone)
    assert [r.done for r in requests] == [r.done for r in twins]


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_node_attends_what_it_would_attend_alone(settings: dict[str, Any]) -> None:
    sim, requests = simulator(settings)
    other = sim.request(4, LENGTH, seed=60)
    sim.end(other)
    rng = random.Random(3)
    draft = random_draft(requests[0], other, 8, rng)
    out = sim.verify(draft)
    for node in range(8):
        alone, (twin, _) = simulator(settings)
        for step, (source, at) in enumerate(draft.sources[n] for n in draft.path(node)):
            place = PROMPTS[0] + step
            for target, values in zip(twin.streams, source.streams, strict=True):
                target[:, place] = values[:, at]
            expected = alone.decode(twin)[:, 0]
        assert torch.equal(out[:, 0, node], expected), node


def test_a_rejected_draft_leaves_nothing() -> None:
    sim, (request, _) = simulator({})
    alone, (twin, _) = simulator({})
    other = sim.request(4, LENGTH, seed=60)
    sim.end(other)
    first = request.done
    wrong = [(other, first + i) for i in range(1, 9)]
    sim.verify(Draft(request, [-1, *range(8)], [(request, first), *wrong], accepted=0))
    alone.decode(twin)
    assert_same_state(sim, alone)
    assert_same_tokens(sim, alone, [request])


def test_the_forward_after_an_abandoned_verification_is_served() -> None:
    sim, (request, two) = simulator({})
    batch = sim._verify_batch((Draft(request, [-1, 0], [(request, request.done)] * 2, 0),))
    sim.coordinator.forward_begin(batch)
    sim.coordinator.forward_abort()
    sim.end(request)
    assert sim.decode(two).isfinite().all()


def test_a_chain_within_a_page_is_one_decode_step() -> None:
    sim, (request, _) = simulator(ROOMY | {"page_size": 16, "budget": 64})
    served: list[int] = []
    sim.coordinator.observe(lambda layer, q, step, selection: served.append(len(q)))
    first = request.done
    chain = [-1, *range(7)]
    sim.verify(Draft(request, chain, [(request, first + i) for i in range(8)], accepted=7))
    assert first % 16 == 5
    assert served == [8] * sim.layers
    # Token 112 fills a page: the next tokens are scored with that page.
    served.clear()
    first = request.done
    sim.verify(Draft(request, chain, [(request, first + i) for i in range(8)], accepted=7))
    assert served == [3, 5] * sim.layers


def test_a_chain_from_dense_to_sparse() -> None:
    # Tokens 105 and 106 are in the same page. Up to token 105 every page is attended.
    settings = ROOMY | {"min_sparse_context": 105, "page_size": 8}
    (sim, (request, _)), (alone, (twin, _)) = simulator(settings), simulator(settings)
    sources = [(request, request.done + i) for i in range(8)]
    out = sim.verify(Draft(request, [-1, *range(7)], sources, accepted=7))
    assert torch.equal(out[:, 0], torch.cat([alone.decode(twin) for _ in sources], 1))
    assert_same_state(sim, alone)


def test_runs_end_at_filled_pages_and_full_rows() -> None:
    # A chain of five, and a branch of two at node 1.
    tree = DraftTree(np.array([-1, 0, 1, 2, 3, 1, 5]), np.array([5, 6, 7, 8, 9, 1, 2]))
    nowhere = np.zeros(7, dtype=bool)
    assert tree.runs(nowhere, 9) == [[0, 1, 5, 6], [2, 3, 4]]
    assert tree.runs(nowhere, 3) == [[0, 1, 5], [6], [2, 3, 4]]
    assert tree.runs(np.arange(7) == 1, 9) == [[0, 1], [5, 6], [2, 3, 4]]


def test_a_node_that_cannot_be_accepted_is_not_served() -> None:
    sim, (request, _) = simulator(ROOMY)
    alone, (twin, _) = simulator(ROOMY)
    first = request.done
    batch = sim._verify_batch((Draft(request, [-1, 0, 0, 0], [(request, first)] * 4, 0),))
    batch.tokens[0, 1:] = -1
    sim.coordinator.forward_begin(batch)
    expected = alone.decode(twin)
    for layer in range(sim.layers):
        q, k, v, *_ = (x[layer, first].expand(4, *x.shape[2:]) for x in request.streams)
        out = sim.coordinator.attention(layer, q, k, v)
        assert torch.equal(out, expected[layer].expand_as(out))
    sim.coordinator.forward_end()
    sim.coordinator.accept_drafts(np.array([0]))
    request.done += 1
    assert_same_state(sim, alone)
    assert_same_tokens(sim, alone, [request])


def test_twins_are_served_once_and_the_longest_branch_last() -> None:
    # A chain 0-1-2, two unused nodes at the root, and a node under the second of them.
    tree = DraftTree(np.array([-1, 0, 1, 0, 0, 4]), np.array([5, 6, 7, 0, 0, 9]))
    assert tree.order == [0, 3, 5, 1, 2]
    assert tree.twins.tolist() == [0, 1, 2, 3, 3, 5]
    assert tree.depths.tolist() == [0, 1, 2, 1, 1, 2]
    chain = DraftTree(np.array([-1, 0, 1, 2, 0]), np.array([5, 6, 7, 8, 0]))
    assert chain.order == [0, 4, 1, 2, 3]
