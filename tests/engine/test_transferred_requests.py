"""Requests that another server has prefilled: their steps are those of a request computed here."""

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
from hisparse.cache.kv_io import read_tokens, write_tokens
from hisparse.testing import Request, Simulator

LENGTH = 180
LATENTS: dict[str, Any] = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "layers first": {"layout": "layer_first", "scope": "layer"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "latents": LATENTS,
    "fp8 latents": LATENTS | {"kv_cache_dtype": "fp8_e4m3", "head_dim": 48, "latent_rank": 32},
    "tail estimate": {"extensions": {"tail_estimate": True}},
    "indexer": {"algorithm": DSA(), "page_size": 1, **LATENTS},
    "windows": {"layers": 4, "windows": (20, 0, 9, 0)},
    "reuse": {"reuse_layers": 2, "layers": 3},
}


def send(source: Simulator, computed: Request, target: Simulator, slot: int) -> Request:
    """Move all computed tokens to host pages of another engine, as a transfer does."""
    request = target.request(slot, LENGTH, 3)
    arrive(source, computed, target, request)
    return request


def arrive(
    source: Simulator, computed: Request, target: Simulator, request: Request, start: int = 0
) -> None:
    """Send the tokens from ``start`` on; the others are in ``target`` already."""
    length, size = computed.done, source.page_size
    target._grow(request, length)
    new, old = (sim._slots(r, start, length) for sim, r in ((target, request), (source, computed)))
    for layer in range(source.layers):
        tokens = read_tokens(source.manager.host.stored(layer), old)
        write_tokens(tokens, target.manager.host.stored(layer), new)
    theirs, stored = target.coordinator.stored_entries(), source.coordinator.stored_entries()
    for name in stored:
        theirs[name][:, request.host_pages] = stored[name][:, computed.host_pages]
    request.done = length
    full = torch.tensor(request.host_pages[start // size : length // size])
    target.arrived.add(request.slot, full)


def engines(shape: dict[str, Any]) -> tuple[Simulator, Simulator]:
    source, target = (Simulator(**({"algorithm": Quest()} | shape)) for _ in range(2))
    target.free_host_pages.reverse()
    target.arrived = target.coordinator.receive_requests()
    return source, target


@pytest.mark.parametrize("prompt", [128, 129, 137])
@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [(Quest(), {}), (Sketch(), {}), (Oracle(), {}), (DIPR(beta=1.0), {})]
    + [(Sketch(), shape) for shape in SHAPES.values()],
    ids=["quest", "sketch", "oracle", "dipr", *SHAPES],
)
def test_steps_are_those_of_a_request_prefilled_here(
    algorithm: BaseSparseAlgorithm, shape: dict[str, Any], prompt: int
) -> None:
    source, target = engines({"algorithm": algorithm} | shape)
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, prompt))
    request = send(source, computed, target, slot=2)
    for _ in range(30):
        assert torch.equal(source.decode(computed), target.decode(request))


def test_requests_join_others_that_decode() -> None:
    source, target = engines({})
    computed = [source.request(slot, LENGTH, 3) for slot in (1, 2)]
    source.prefill((computed[0], 100), (computed[1], 137))
    first = send(source, computed[0], target, slot=2)
    for _ in range(5):
        assert torch.equal(source.decode(computed[0]), target.decode(first))
    second = send(source, computed[1], target, slot=1)
    for _ in range(20):
        assert torch.equal(source.decode(*computed), target.decode(first, second))


def test_a_shared_prefix_outlives_a_request_that_ends_before_it_decodes() -> None:
    """Only what follows the prefix is sent to the second request."""
    source, target = engines({})
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, 128))
    ended = send(source, computed, target, slot=1)
    target.end(ended)
    shared = 96
    request = target.request(2, LENGTH, 3, like=ended, shared=shared)
    arrive(source, computed, target, request, start=shared)
    for _ in range(20):
        assert torch.equal(source.decode(computed), target.decode(request))


def test_without_building_representations_steps_would_differ() -> None:
    """Otherwise the tests above would show nothing."""
    source, target = engines({"checked": False})
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, 137))
    request = send(source, computed, target, slot=2)
    target.arrived.drop(2)
    assert not torch.equal(source.decode(computed), target.decode(request))


def test_a_slot_that_begins_again_waits_for_nothing() -> None:
    source, target = engines({})
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, 128))
    target.end(send(source, computed, target, slot=2))
    assert not target.arrived.any_of([2])


def test_no_captured_step_serves_a_request_that_has_just_arrived() -> None:
    source, target = engines({"checked": False})
    computed = source.request(1, LENGTH, 3)
    source.prefill((computed, 128))
    request = send(source, computed, target, slot=2)
    first = target.next_tokens(request)
    assert not first.begin_replay(target.coordinator)
    target.coordinator.forward_begin(first)
    target._forward([(request, request.done - 1, request.done)])
    assert target.next_tokens(request).begin_replay(target.coordinator)
