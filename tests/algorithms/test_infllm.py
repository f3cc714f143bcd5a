"""InfLLM-V2: the tokens that MiniCPM attends by SGLang's code, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms.infllm import InfLLM
from hisparse.testing import Request, Simulator
from hisparse.testing.simulator import INDEXER_DIM
from hisparse.types import IndexerInputs
from tests.infllm import selected

LAYERS, SIZE, BLOCKS, LENGTH, PROMPT = 2, 8, 4, 190, 110
SHAPES = [
    {"kernel_size": 4, "kernel_stride": 2, "init_blocks": 1, "window_size": SIZE},
    {"kernel_size": 8, "kernel_stride": 2, "init_blocks": 0, "window_size": 2 * SIZE},
    {"kernel_size": 4, "kernel_stride": 4, "init_blocks": 1, "window_size": SIZE},
]


def sparse_config(shape: dict[str, int], dense_len: int) -> dict[str, int]:
    topk = BLOCKS - shape["window_size"] // SIZE
    return shape | {"block_size": SIZE, "topk": topk, "dense_len": dense_len}


def simulator(sparse: dict[str, int], **changes: Any) -> Simulator:
    kernel = {x: sparse[x] for x in ("kernel_size", "kernel_stride")}
    budget = max(BLOCKS * SIZE, sparse["dense_len"])
    options: dict[str, Any] = {
        "algorithm": InfLLM(blocks=BLOCKS, **kernel),
        "scope": "kv_head",
        "page_size": SIZE,
        "budget": budget,
        "device_buffer": budget,
        "max_row": 2 * budget,
        "num_sink_pages": sparse["init_blocks"],
        "num_recent_pages": sparse["window_size"] // SIZE,
        "host_pages": LENGTH,
        "staging_pages": 5,
        "head_dim": INDEXER_DIM,
        "scale": 0.1,
    }
    return Simulator(**options | changes)


def request_of(sim: Simulator, slot: int = 1, seed: int = 1) -> Request:
    """A request whose queries and keys are the inputs of the selection too."""
    request = sim.request(slot, LENGTH, seed=seed)
    weights = torch.full(request.q.shape[:3], torch.nan)
    request.indexer = IndexerInputs(request.q, request.k.flatten(2), weights)
    return request


def expected(sim: Simulator, request: Request, sparse: dict[str, int]) -> tuple[Tensor, Tensor]:
    """What is attended, ``[L, Hkv, n, n] bool``, and the output in float64, ``[L, n, Hq, D]``."""
    pairs = zip(request.q, request.k, strict=True)
    seen = torch.stack([selected(q, k, sim.scale, sparse) for q, k in pairs])
    q, k, v = (x.double() for x in (request.q, request.k, request.v))
    k, v = (x.repeat_interleave(sim.spec.group_size, dim=2) for x in (k, v))
    hidden = ~seen.repeat_interleave(sim.spec.group_size, dim=1)
    logits = torch.einsum("lqhd,lkhd->lhqk", q, k) * sim.scale
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return seen, torch.einsum("lhqk,lkhd->lqhd", weights, v)


@pytest.mark.parametrize("chunks", [(PROMPT,), (20, 49, 2, 39)], ids=["whole", "chunks"])
@pytest.mark.parametrize("dense_len", [0, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: "-".join(map(str, x.values())))
def test_the_output_is_attention_over_the_tokens_of_the_reference(
    shape: dict[str, int], dense_len: int, chunks: tuple[int, ...]
) -> None:
    """In prefill and decoding, at up to six times the selected tokens, for each KV head."""
    sparse = sparse_config(shape, dense_len)
    sim = simulator(sparse)
    request = request_of(sim)
    outs = [sim.prefill((request, chunk))[0] for chunk in chunks]
    while request.done < LENGTH:
        outs.append(sim.decode(request))
    seen, output = expected(sim, request, sparse)
    assert (seen[:, 0] != seen[:, 1]).any()
    assert int(seen[..., -1, :].sum(-1).max()) == (BLOCKS - 1) * SIZE + (LENGTH - 1) % SIZE + 1
    assert (torch.cat(outs, 1).double() - output).abs().max() < 1e-4
    assert sim.coordinator.stats().miss_pages > 0


def test_requests_that_share_a_prefix_keep_to_themselves() -> None:
    sparse = sparse_config(SHAPES[0], 40)
    sim = simulator(sparse)
    again, beside = request_of(sim), request_of(sim, slot=2, seed=2)
    outputs = [expected(sim, x, sparse)[1] for x in (again, beside)]
    sim.prefill((again, 90), (beside, 71))
    for _ in range(5):
        sim.decode(beside, again)
    # Retracted: the pages that are full stay, and the rest is computed again.
    kept = again.done // SIZE * SIZE
    sim.end(again)
    shared = request_of(sim, slot=3)
    shared.host_pages, shared.done = again.host_pages[: kept // SIZE], kept
    sim.prefill((shared, again.done - kept))
    for _ in range(7):
        at = shared.done, beside.done
        out = sim.decode(shared, beside).double()
        for row, (position, output) in enumerate(zip(at, outputs, strict=True)):
            assert (out[:, row] - output[:, position]).abs().max() < 1e-4


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="kernel_size: got 24, expected a multiple of kernel_st"):
        InfLLM(kernel_size=24)
    with pytest.raises(ValueError, match="blocks: got 0, expected at least 1"):
        InfLLM(blocks=0)
