"""Pages that come from a store: steps select and attend as if this server had computed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.algorithms.snapkv import SnapKV
from hisparse.cache.kv_io import read_tokens, write_tokens
from hisparse.engine.extensions.tail_estimate import TailEstimate
from hisparse.engine.restored import RestoredPages
from hisparse.testing import Request, Simulator

LENGTH, STORED, PROMPT = 180, 96, 136
LATENTS: dict[str, Any] = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}
LATENTS |= {"page_size": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "pages first": {"layout": "page_first"},
    "layers first": {"layout": "layer_first", "scope": "layer"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "latents": {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16},
    "tail estimate": {"extensions": {"tail_estimate": True}},
    "indexer": {"algorithm": DSA(), **LATENTS},
    "reuse": {"reuse_layers": 2, "layers": 3},
}


def load(
    source: Simulator, computed: Request, target: Simulator, request: Request
) -> RestoredPages:
    """Move the first ``STORED`` tokens to pages of another engine, as a store would."""
    _, loaded = target.coordinator.share_pages()
    target._grow(request, STORED)
    new, old = (sim._slots(r, 0, STORED) for sim, r in ((target, request), (source, computed)))
    for layer in range(source.layers):
        tokens = read_tokens(source.manager.host.stored(layer), old)
        write_tokens(tokens, target.manager.host.stored(layer), new)
    pages = [torch.tensor(r.host_pages[: STORED // source.page_size]) for r in (request, computed)]
    stored = source.coordinator.stored_entries()
    for name, entries in target.coordinator.stored_entries().items():
        entries[:, pages[0]] = stored[name][:, pages[1]]
    loaded.add(torch.tensor(request.host_pages))
    request.done = STORED
    return loaded


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [(Quest(), {}), (Sketch(), {}), (Oracle(), {}), (SnapKV(), {}), (DIPR(beta=1.0), {})]
    + [(Sketch(), shape) for shape in SHAPES.values()],
    ids=["quest", "sketch", "oracle", "snapkv", "dipr", *SHAPES],
)
def test_steps_are_those_of_a_computed_prompt(
    algorithm: BaseSparseAlgorithm, shape: dict[str, Any]
) -> None:
    source, target = (Simulator(**({"algorithm": algorithm} | shape)) for _ in range(2))
    target.free_host_pages.reverse()
    computed, request = (
        sim.request(slot, LENGTH, 3, prompt=PROMPT) for sim, slot in ((source, 1), (target, 2))
    )
    source.prefill((computed, STORED))
    load(source, computed, target, request)
    pairs = [(source.prefill((computed, 40))[0], target.prefill((request, 40))[0])]
    pairs += [(source.decode(computed), target.decode(request)) for _ in range(30)]
    for got, expected in pairs:
        assert torch.equal(got, expected)


def test_extensions_build_what_they_keep_of_an_indexers_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store keeps the indexer's keys alone, so that servers need not have the same extensions."""
    # No extension of hisparse's takes pages of one token, which indexers have; others may.
    monkeypatch.setattr(TailEstimate, "check", lambda options, config: None)
    shape = LATENTS | {"extensions": {"tail_estimate": True}}
    with_means, without = (Simulator(algorithm=DSA(), **x) for x in (shape, LATENTS))
    names = list(with_means.coordinator.stored_entries())
    assert names == list(without.coordinator.stored_entries())
    assert len(with_means.coordinator.representations.of_pages) > len(names) > 0
    test_steps_are_those_of_a_computed_prompt(DSA(), shape)


def test_without_building_them_steps_would_differ() -> None:
    """Otherwise the test above would show nothing."""
    source, target = (Simulator(algorithm=Quest(), checked=False) for _ in range(2))
    computed, request = source.request(1, LENGTH, seed=3), target.request(2, LENGTH, seed=3)
    source.prefill((computed, STORED))
    load(source, computed, target, request).drop(torch.tensor(request.host_pages))
    source.prefill((computed, 20))
    target.prefill((request, 20))
    assert not torch.equal(source.decode(computed), target.decode(request))


def test_two_requests_of_one_forward_share_loaded_pages() -> None:
    source, target = (Simulator(algorithm=Quest()) for _ in range(2))
    computed, request = source.request(1, LENGTH, seed=3), target.request(2, LENGTH, seed=3)
    source.prefill((computed, STORED))
    load(source, computed, target, request)
    other = target.request(3, LENGTH, seed=4, like=request, shared=STORED)
    alike = source.request(3, LENGTH, seed=4, like=computed, shared=STORED)
    source.prefill((computed, 16), (alike, 24))
    target.prefill((request, 16), (other, 24))
    for _ in range(20):
        assert torch.equal(source.decode(computed, alike), target.decode(request, other))


def test_loaded_and_computed_pages_take_turns() -> None:
    """As when a part of a prefix was in host memory."""
    source, target = (Simulator(algorithm=Quest()) for _ in range(2))
    computed, request = source.request(1, LENGTH, seed=3), target.request(2, LENGTH, seed=3)
    source.prefill((computed, STORED))
    loaded = load(source, computed, target, request)
    request.done = 0
    target.prefill((request, 40))
    loaded.drop(torch.tensor(request.host_pages[:5]))
    request.done = STORED
    source.prefill((computed, 20))
    target.prefill((request, 20))
    for _ in range(20):
        assert torch.equal(source.decode(computed), target.decode(request))
