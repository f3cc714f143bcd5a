"""Drafts: each token is served as if it were decoded alone, and rejected ones leave no trace."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.msa import MSA
from hisparse.algorithms.quest import Quest
from hisparse.cache.kv_io import read_tokens
from hisparse.engine.verify import VerifyBatch
from hisparse.testing import Request, Simulator
from hisparse.types import IndexerInputs
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
#: An indexer whose keys are written before their page is full.
BLOCKS: dict[str, Any] = {"algorithm": MSA(index_dtype="float32"), "num_sink_pages": 0}
#: Rows that hold all pages that drafts select, so that a run has many tokens.
ROOMY = {"device_buffer": 160, "max_row": 160}
#: A run has up to four tokens, which select pages that the row lacks.
HOST = {"budget": 20, "miss": "host"}
SETTINGS = [
    pytest.param({}, id="sketch"),
    pytest.param({"algorithm": Quest(), "scope": "layer"}, id="quest"),
    pytest.param(
        {"algorithm": Quest(), "scope": "query_head", "kv_cache_dtype": "fp8_e4m3"}, id="quest-fp8"
    ),
    pytest.param(TOKENS, id="dsa-latents"),
    pytest.param(TOKENS | {"kv_cache_dtype": "fp8_e4m3"}, id="dsa-latents-fp8"),
    pytest.param(BLOCKS, id="msa"),
    pytest.param(BLOCKS | ROOMY | {"page_size": 16, "budget": 64}, id="msa-drafts-within-a-page"),
    pytest.param({"algorithm": DIPR(alpha=0.5)}, id="dipr"),
    pytest.param({"layers": 4, "reuse_layers": 2, "dense_layers": (1,)}, id="reuse-dense-layer"),
    pytest.param({"min_sparse_context": 105}, id="dense-and-sparse"),
    pytest.param({"min_sparse_context": 1000, "layout": "layer_first"}, id="staged"),
    pytest.param(
        {"page_size": 2, "budget": 16, "device_buffer": 16, "max_row": 16, "num_recent_pages": 1},
        id="drafts-fill-many-pages",
    ),
    pytest.param({"layers": 4, "windows": (20, 0, 9, 33)}, id="windows-sinks"),
    pytest.param(HOST, id="host"),
    pytest.param(ROOMY, id="rows-with-room-for-all-drafts"),
    pytest.param(ROOMY | {"page_size": 16, "budget": 64}, id="drafts-within-a-page"),
]


@dataclass
class Draft:
    """The drafts of one request.

    Attributes:
        request: its computed tokens are those before token 0.
        sources: for each token, the request and the position that its q, k and v come from.
        length: tokens of the chain; the others are never accepted.
        accepted: the last accepted token.
    """

    request: Request
    sources: list[tuple[Request, int]]
    length: int
    accepted: int


class DraftingSimulator(Simulator):
    """Verifies drafts as SGLang does: one forward, then what is accepted."""

    def request(self, *args: Any, **options: Any) -> Request:
        """The same; where heads select apart, with a head of the indexer for each of them."""
        new = super().request(*args, **options)
        if self.algorithm.indexer and self.policy.heads > 1:
            queries, keys, weights = new.indexer
            heads = self.policy.heads
            new.indexer = IndexerInputs(queries[:, :, :heads], keys, weights[..., :heads])
        return new

    def reserve(self, request: Request, length: int) -> None:
        """Give a request the host pages of its first ``length`` tokens."""
        self._grow(request, length)

    def verify(self, *drafts: Draft) -> Tensor:
        """Verify drafts of equal size; returns ``[L, B, n, Hq, D]``, and keeps the accepted."""
        self.coordinator.forward_begin(self.verify_batch(*drafts))
        shape = (len(drafts), len(drafts[0].sources))
        outs = []
        for layer in range(self.layers):
            tokens = [s for draft in drafts for s in draft.sources]
            streams = zip(*([x[layer, at] for x in r.streams] for r, at in tokens), strict=True)
            q, k, v, *indexer = (torch.stack(parts) for parts in streams)
            inputs = IndexerInputs(*indexer)
            sinks = None if self.sinks is None else self.sinks[layer]
            out = self.coordinator.attention(layer, q, k, v, inputs, sinks)
            outs.append(out.unflatten(0, shape))
        self.coordinator.forward_end()
        self.coordinator.accept_drafts(np.array([draft.accepted for draft in drafts]))
        for draft in drafts:
            draft.request.done += draft.accepted + 1
        return torch.stack(outs)

    def verify_batch(self, *drafts: Draft) -> VerifyBatch:
        """Drafts of equal size as the engine takes them."""
        requests = [draft.request for draft in drafts]
        count = len(drafts[0].sources)
        tables = [self._grow(r, r.done + count) for r in requests]
        width = max(map(len, tables))
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = pages
        return VerifyBatch(
            slots=torch.tensor([r.slot for r in requests]),
            slots_cpu=np.array([r.slot for r in requests]),
            seq_lens_cpu=np.array([r.done for r in requests]),
            chain_lengths=np.array([draft.length for draft in drafts]),
            host_slots=torch.stack([self._slots(r, r.done, r.done + count) for r in requests]),
            host_page_table=table,
        )


def random_draft(request: Request, other: Request, count: int, rng: random.Random) -> Draft:
    """A random chain that starts with the request's own next tokens.

    Args:
        request: the request.
        other: a request of the same length; rejected drafts have its tokens.
        count: tokens, those after the chain included.
        rng: decides how long the chain is, and how much of it is accepted.
    """
    first, length = request.done, rng.randint(1, count)
    most = min(length, request.length - first)
    right = rng.choice([most, rng.randint(1, most)])
    sources = [
        (request, first + i) if i < right else (other, (first + i) % other.length)
        for i in range(count)
    ]
    return Draft(request, sources, length, right - 1)


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


def assert_served(got: Tensor, expected: Tensor, settings: dict[str, Any], where: object) -> None:
    """Bit for bit; to rounding if tokens of a run load what the CPU attends for one alone."""
    if settings.get("miss") == "host":
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(got, expected), where


def bits(tensor: Tensor) -> Tensor:
    """The bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def assert_same_state(
    sim: DraftingSimulator, alone: DraftingSimulator, requests: list[Request]
) -> None:
    """LRU tables, representations, resident pages and tail pages are those of ``alone``.

    Of an indexer of blocks those of full pages: nothing reads the others before they are.
    """
    full = [page for r in requests for page in r.host_pages[: r.done // sim.page_size]]
    blocks = sim.algorithm.indexer and sim.page_size > 1
    # Not those of the padding page.
    compared = full if blocks else slice(1, None)
    one, two = sim.manager.device, alone.manager.device
    for name, a, b in zip(one.states._fields, one.states, two.states, strict=True):
        if a is not None:
            assert torch.equal(a, b), name
    assert torch.equal(one.capacity, two.capacity)
    assert torch.equal(one.tail_pages, two.tail_pages)
    for name, tensor in sim.representations.of_pages.items():
        other = alone.representations.of_pages[name]
        assert torch.equal(bits(tensor[:, compared]), bits(other[:, compared])), name
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
            host = (read_tokens(s.manager.host.stored(layer), slots) for s in (sim, alone))
            for a, b in zip(*(stored.tensors for stored in host), strict=True):
                assert torch.equal(bits(a), bits(b)), "host memory"
            rows = slice(request.slot * heads, (request.slot + 1) * heads)
            tails = sim.manager.device.tail_pages[layer, rows].long()
            stored = (s.manager.device.stored(layer) for s in (sim, alone))
            for a, b in zip(*(each.tensors for each in stored), strict=True):
                filled = (..., slice(count % size), slice(None))
                assert torch.equal(bits(a[tails][filled]), bits(b[tails][filled])), "tail pages"


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", sized([5], range(25)))
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
        for token in range(max(draft.accepted for draft in drafts) + 1):
            some = [b for b, draft in enumerate(drafts) if token <= draft.accepted]
            expected = alone.decode(*(twins[b] for b in some))
            assert_served(out[:, some, token], expected, settings, (before, token))
        assert_same_tokens(sim, alone, requests)
        assert_same_state(sim, alone, requests)
    assert [r.done for r in requests] == [r.done for r in twins]


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_draft_attends_what_it_would_attend_alone(settings: dict[str, Any]) -> None:
    sim, (request, _) = simulator(settings)
    other = sim.request(4, LENGTH, seed=60)
    sim.end(other)
    first = request.done
    sources = [(request if i < 3 else other, first + i) for i in range(8)]
    out = sim.verify(Draft(request, sources, length=6, accepted=2))
    alone, (twin, _) = simulator(settings)
    for token, (source, at) in enumerate(sources[:6]):
        for target, values in zip(twin.streams, source.streams, strict=True):
            target[:, first + token] = values[:, at]
        assert_served(out[:, 0, token], alone.decode(twin)[:, 0], settings, token)
    # What is after the chain is not served.
    assert torch.equal(out[:, 0, 6:], out[:, 0, :1].expand(-1, 2, -1, -1))


def test_the_forward_after_an_abandoned_verification_is_served() -> None:
    sim, (request, two) = simulator({})
    draft = Draft(request, [(request, request.done)] * 2, length=2, accepted=0)
    sim.coordinator.forward_begin(sim.verify_batch(draft))
    sim.coordinator.forward_abort()
    sim.end(request)
    assert sim.decode(two).isfinite().all()


def test_a_chain_within_a_page_is_one_decode_step() -> None:
    sim, (request, _) = simulator(ROOMY | {"page_size": 16, "budget": 64})
    served: list[int] = []
    sim.coordinator.observe(lambda layer, q, step, selection: served.append(len(q)))
    first = request.done
    sim.verify(Draft(request, [(request, first + i) for i in range(8)], length=8, accepted=7))
    assert first % 16 == 5
    assert served == [8] * sim.layers
    # Token 112 fills a page: the next tokens are scored with that page.
    served.clear()
    first = request.done
    sim.verify(Draft(request, [(request, first + i) for i in range(8)], length=8, accepted=7))
    assert served == [3, 5] * sim.layers


def test_keys_of_accepted_drafts_stay_in_a_page_that_rejected_ones_fill() -> None:
    settings = BLOCKS | ROOMY | {"page_size": 16, "budget": 64}
    (sim, (request, _)), (alone, (twin, _)) = simulator(settings), simulator(settings)
    for accepted in (6, 1, 6):  # Of seven tokens each, from 101, 108 and 110 on.
        sources = [(request, request.done + i) for i in range(7)]
        sim.verify(Draft(request, sources, length=7, accepted=accepted))
    while twin.done < request.done:
        alone.decode(twin)
    assert_same_state(sim, alone, [request])


def test_a_chain_from_dense_to_sparse() -> None:
    # Tokens 105 and 106 are in the same page. Up to token 105 every page is attended.
    settings = ROOMY | {"min_sparse_context": 105, "page_size": 8}
    (sim, (request, _)), (alone, (twin, _)) = simulator(settings), simulator(settings)
    sources = [(request, request.done + i) for i in range(8)]
    out = sim.verify(Draft(request, sources, length=8, accepted=7))
    assert torch.equal(out[:, 0], torch.cat([alone.decode(twin) for _ in sources], 1))
    assert_same_state(sim, alone, [request])
