"""Pages of a store, and requests of another server: steps are as if this one had computed them."""

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
from hisparse.engine.received import RestoredPages
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


def move(
    source: Simulator,
    computed: Request,
    target: Simulator,
    request: Request,
    stop: int,
    start: int = 0,
) -> None:
    """Move tokens ``start`` to ``stop - 1`` to another engine, with what it cannot build."""
    size = source.page_size
    target._grow(request, stop)
    new, old = (sim._slots(r, start, stop) for sim, r in ((target, request), (source, computed)))
    for layer in range(source.layers):
        tokens = read_tokens(source.manager.host.stored(layer), old)
        write_tokens(tokens, target.manager.host.stored(layer), new)
    pages = slice(start // size, -(-stop // size))
    stored = source.coordinator.stored_entries()
    for name, entries in target.coordinator.stored_entries().items():
        entries[:, request.host_pages[pages]] = stored[name][:, computed.host_pages[pages]]
    request.done = stop


def load(
    source: Simulator, computed: Request, target: Simulator, request: Request
) -> RestoredPages:
    """Move the first ``STORED`` tokens to pages of another engine, as a store would."""
    _, loaded = target.coordinator.share_pages()
    move(source, computed, target, request, STORED)
    loaded.add(torch.tensor(request.host_pages))
    return loaded


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [(Quest(), {}), (Sketch(), {}), (Oracle(), {}), (SnapKV(), {}), (DIPR(), {})]
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
    """A store keeps only the indexer's keys, so that servers need not have the same extensions."""
    # No extension of hisparse's takes pages of one token, which indexers have; others may.
    monkeypatch.setattr(TailEstimate, "check", lambda options, config: None)
    shape = LATENTS | {"extensions": {"tail_estimate": True}}
    with_means, without = (Simulator(algorithm=DSA(), **x) for x in (shape, LATENTS))
    names = list(with_means.coordinator.stored_entries())
    assert names == list(without.coordinator.stored_entries())
    assert len(with_means.coordinator.representations.of_pages) > len(names) > 0
    test_steps_are_those_of_a_computed_prompt(DSA(), shape)


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


#: Shapes of servers that get requests from others.
SENT = {name: SHAPES[name] for name in ("layers first", "fp8", "latents", "tail estimate", "reuse")}
SENT |= {
    "fp8 latents": SHAPES["latents"]
    | {"kv_cache_dtype": "fp8_e4m3", "head_dim": 48, "latent_rank": 32},
    "indexer": SHAPES["indexer"],
    "windows": {"layers": 4, "windows": (20, 0, 9, 0)},
}


def send(
    source: Simulator, computed: Request, target: Simulator, request: Request, start: int = 0
) -> Request:
    """Move the computed tokens from ``start`` on, as a transfer does; the others are there."""
    move(source, computed, target, request, computed.done, start)
    pages = slice(start // source.page_size, computed.done // source.page_size)
    target.arrived.add(request.slot, torch.tensor(request.host_pages[pages]))
    return request


def engines(shape: dict[str, Any]) -> tuple[Simulator, Simulator]:
    source, target = (Simulator(**({"algorithm": Quest()} | shape)) for _ in range(2))
    target.free_host_pages.reverse()
    target.arrived = target.coordinator.receive_requests()
    return source, target


@pytest.mark.parametrize("prompt", [128, 129, 137])
@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [(Quest(), {}), (Sketch(), {}), (Oracle(), {}), (DIPR(), {})]
    + [(Sketch(), shape) for shape in SENT.values()],
    ids=["quest", "sketch", "oracle", "dipr", *SENT],
)
def test_steps_are_those_of_a_request_prefilled_here(
    algorithm: BaseSparseAlgorithm, shape: dict[str, Any], prompt: int
) -> None:
    source, target = engines({"algorithm": algorithm} | shape)
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, prompt))
    request = send(source, computed, target, target.request(2, LENGTH, 3))
    for _ in range(30):
        assert torch.equal(source.decode(computed), target.decode(request))


def test_requests_join_others_that_decode() -> None:
    source, target = engines({})
    computed = [source.request(slot, LENGTH, 3) for slot in (1, 2)]
    source.prefill((computed[0], 100), (computed[1], 137))
    first = send(source, computed[0], target, target.request(2, LENGTH, 3))
    for _ in range(5):
        assert torch.equal(source.decode(computed[0]), target.decode(first))
    second = send(source, computed[1], target, target.request(1, LENGTH, 3))
    for _ in range(20):
        assert torch.equal(source.decode(*computed), target.decode(first, second))


def test_a_shared_prefix_outlives_a_request_that_ends_before_it_decodes() -> None:
    """Only what follows the prefix is sent to the second request."""
    source, target = engines({})
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, 128))
    ended = send(source, computed, target, target.request(1, LENGTH, 3))
    target.end(ended)
    shared = 96
    request = target.request(2, LENGTH, 3, like=ended, shared=shared)
    send(source, computed, target, request, start=shared)
    for _ in range(20):
        assert torch.equal(source.decode(computed), target.decode(request))


def test_a_slot_that_begins_again_waits_for_nothing() -> None:
    source, target = engines({})
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, 128))
    target.end(send(source, computed, target, target.request(2, LENGTH, 3)))
    assert not target.arrived.any_of([2])


def test_no_captured_step_serves_a_request_that_has_just_arrived() -> None:
    source, target = engines({"checked": False})
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, 128))
    request = send(source, computed, target, target.request(2, LENGTH, 3))
    first = target.next_tokens(request)
    assert not first.begin_replay(target.coordinator)
    target.coordinator.forward_begin(first)
    target._forward([(request, request.done - 1, request.done)])
    assert target.next_tokens(request).begin_replay(target.coordinator)
