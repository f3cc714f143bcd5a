"""Prefill in ragged chunks of several requests equals dense attention over the whole prompts."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hisparse.kernels.build.cpu import cpu_library
from hisparse.testing import Simulator

_SHAPES = {
    "mha": {"q_heads": 2, "kv_heads": 2},
    "gqa": {"q_heads": 6, "kv_heads": 2},
    "mqa": {"q_heads": 5, "kv_heads": 1, "scope": "layer"},
    "latent": {"q_heads": 4, "kv_heads": 1, "head_dim": 24, "latent_rank": 16, "scope": "layer"},
}


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("staging_pages", [3, 40])
def test_chunks_after_staged_prefixes_equal_dense_attention(shape: str, staging_pages: int) -> None:
    """Chunks end within pages, tiles end within a prefix, and one request is a single token."""
    sim = Simulator(staging_pages=staging_pages, **_SHAPES[shape])
    lengths = {1: [150, 61, 1, 130], 2: [7, 190, 33, 4], 3: [1]}
    requests = {slot: sim.request(slot, sum(n), seed=slot) for slot, n in lengths.items()}
    for step in range(4):
        parts = [(requests[s], n[step]) for s, n in lengths.items() if step < len(n)]
        starts = [request.done for request, _ in parts]
        outs = sim.prefill(*parts)
        for (request, n), start, out in zip(parts, starts, outs, strict=True):
            dense = sim.dense(request, start, start + n)
            assert_close(out.double(), dense, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(cpu_library() is None, reason="the order of PyTorch's sums differs")
@pytest.mark.parametrize("shape", ["gqa", "latent"])
@pytest.mark.parametrize("cached", [1, 16, 100, 255])
def test_a_prefix_from_the_pool_changes_no_bit(shape: str, cached: int) -> None:
    """A prefix of one tile: the sums have the order that they have in a chunk of the whole."""
    outs = []
    for parts in ([256], [cached, 256 - cached]):
        sim = Simulator(staging_pages=40, **_SHAPES[shape])
        request = sim.request(1, 256, seed=5)
        outs.append(torch.cat([sim.prefill((request, part))[0] for part in parts], dim=1))
    assert torch.equal(*outs)
