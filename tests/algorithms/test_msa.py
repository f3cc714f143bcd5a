"""MSA: the tokens that transformers' MiniMax-M3 attends, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLIndexer,
    MiniMaxM3VLRotaryEmbedding,
    apply_rotary_pos_emb,
)

from hisparse.algorithms.msa import MSA, _best_in_place, _places, _signed, _signs
from hisparse.kernels import index_score
from hisparse.testing import Request, Simulator
from hisparse.testing.simulator import INDEXER_DIM
from hisparse.types import IndexerInputs

LAYERS, SIZE, BLOCKS, LENGTH, PROMPT, KV_HEADS = 2, 8, 4, 190, 110, 2


class Indexed:
    """The indexers of a model, with random hidden states ``[L, n, hidden size]``."""

    def __init__(self, local: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.config = MiniMaxM3VLTextConfig(
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=KV_HEADS,
            head_dim=INDEXER_DIM,
            rotary_dim=INDEXER_DIM // 2,
            index_n_heads=KV_HEADS,
            index_head_dim=INDEXER_DIM,
            index_block_size=SIZE,
            index_topk_blocks=BLOCKS,
            index_local_blocks=local,
            layer_types=["minimax_m3_sparse"] * LAYERS,
        )
        self.indexers = [MiniMaxM3VLIndexer(self.config, layer) for layer in range(LAYERS)]
        for module in self.indexers:
            for weight in module.parameters():
                torch.nn.init.normal_(weight, 0, 0.3 if weight.ndim == 1 else 0.1)
        self.hidden = torch.randn(LAYERS, LENGTH, 64)
        rotary = MiniMaxM3VLRotaryEmbedding(self.config)
        self.cos_sin = rotary(self.hidden, torch.arange(LENGTH)[None])

    @torch.no_grad()
    def inputs(self, layer: int) -> IndexerInputs:
        """Queries and keys of a layer; weights, which nobody reads, are NaN."""
        module, hidden = self.indexers[layer], self.hidden[layer]
        queries = module.q_norm(module.q_proj(hidden).unflatten(-1, (-1, INDEXER_DIM)))
        keys = module.k_norm(module.k_proj(hidden))[:, None]
        cos, sin = (x[0] for x in self.cos_sin)
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        return IndexerInputs(queries, keys[:, 0], torch.full(queries.shape[:2], torch.nan))

    @torch.no_grad()
    def selected(self, layer: int) -> Tensor:
        """``[Hkv, n, n] bool``, the tokens that transformers attends for each query."""
        module, at = self.indexers[layer], torch.arange(LENGTH)[None]
        blocks = module(self.hidden[layer][None], self.cos_sin, None, at)
        mask = module.build_block_mask(blocks, None, LENGTH, torch.float32, blocks.device, at)
        return (mask[0] == 0).unflatten(0, (KV_HEADS, -1))[:, 0]


def simulator(local: int, **changes: Any) -> Simulator:
    options: dict[str, Any] = {"algorithm": MSA(index_dtype="float32")}
    return Simulator(
        scope="kv_head",
        page_size=SIZE,
        budget=BLOCKS * SIZE,
        device_buffer=BLOCKS * SIZE,
        max_row=2 * BLOCKS * SIZE,
        num_sink_pages=0,
        num_recent_pages=local - 1,
        host_pages=LENGTH,
        staging_pages=5,
        **(options | changes),
    )


def request_of(sim: Simulator, model: Indexed, slot: int = 1) -> Request:
    request = sim.request(slot, LENGTH, seed=1)
    inputs = [model.inputs(layer) for layer in range(LAYERS)]
    request.indexer = IndexerInputs(*(torch.stack(x) for x in zip(*inputs, strict=True)))
    return request


def attend(sim: Simulator, request: Request, selected: Tensor) -> Tensor:
    """Attention in float64 over ``selected [L, Hkv, n, n] bool``, ``[L, n, Hq, D]``."""
    q, k, v = (x.double() for x in (request.q, request.k, request.v))
    k, v = (x.repeat_interleave(sim.spec.group_size, dim=2) for x in (k, v))
    hidden = ~selected.repeat_interleave(sim.spec.group_size, dim=1)
    logits = torch.einsum("lqhd,lkhd->lhqk", q, k) * sim.scale
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("lhqk,lkhd->lqhd", weights, v)


@pytest.mark.parametrize("chunks", [(PROMPT,), (20, 49, 2, 39)], ids=["whole", "chunks"])
@pytest.mark.parametrize("local", [1, 2])
def test_the_output_is_attention_over_the_tokens_of_transformers(
    local: int, chunks: tuple[int, ...]
) -> None:
    """In prefill and decoding, at up to six times the budget, each KV head with its own blocks."""
    sim, model = simulator(local), Indexed(local, seed=local)
    request = request_of(sim, model)
    outs = [sim.prefill((request, chunk))[0] for chunk in chunks]
    while request.done < LENGTH:
        outs.append(sim.decode(request))
    selected = torch.stack([model.selected(layer) for layer in range(LAYERS)])
    assert (selected[:, 0] != selected[:, 1]).any()
    assert int(selected[..., -1, :].sum(-1).max()) == (BLOCKS - 1) * SIZE + (LENGTH - 1) % SIZE + 1
    error = (torch.cat(outs, 1).double() - attend(sim, request, selected)).abs()
    assert error.max() < 1e-4
    assert sim.coordinator.stats().miss_pages > 0


def test_dense_layers_attend_every_token() -> None:
    """A model's layers without an indexer give no inputs."""
    sim, model = simulator(1, dense_layers=(0,)), Indexed(1, seed=5)
    request = request_of(sim, model)
    outs = [sim.prefill((request, PROMPT))[0]]
    while request.done < LENGTH:
        outs.append(sim.decode(request))
    causal = torch.ones(KV_HEADS, LENGTH, LENGTH, dtype=torch.bool).tril()
    dense = torch.stack([causal, model.selected(1)])
    found = torch.cat(outs, 1).double()[1]
    assert (found - attend(sim, request, dense)[1]).abs().max() < 1e-4
    decoded = torch.cat(outs[1:], 1).double()[0]
    assert (decoded - attend(sim, request, dense)[0, PROMPT:]).abs().max() < 1e-4


def test_requests_that_share_a_prefix_keep_to_themselves() -> None:
    model = Indexed(1, seed=7)
    alone = simulator(1)
    first = request_of(alone, model)
    alone.prefill((first, 90))
    expected = [alone.decode(first)[:, 0] for _ in range(12)]
    sim = simulator(1)
    again, beside = request_of(sim, model), request_of(sim, model, slot=2)
    sim.prefill((again, 90), (beside, 71))
    got = [sim.decode(beside, again)[:, 1] for _ in range(5)]
    # Retracted: the pages that are full stay, and the rest is computed again.
    kept = again.done // SIZE * SIZE
    sim.end(again)
    shared = request_of(sim, model, slot=3)
    shared.host_pages, shared.done = again.host_pages[: kept // SIZE], kept
    sim.prefill((shared, again.done - kept))
    got += [sim.decode(shared, beside)[:, 0] for _ in range(7)]
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scores_of_a_gpu_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    """Which takes the index scores of tokens: a query and its negative stand for two heads."""
    torch.manual_seed(1)
    queries, keys = torch.randn(3, KV_HEADS, 16), torch.randn(20, SIZE, 16).to(dtype)
    table = torch.randint(20, (3, 7), dtype=torch.int32)
    counts = torch.tensor([6, 0, 4], dtype=torch.int32)
    places = _places(table, SIZE).repeat_interleave(KV_HEADS, 0)
    rows = (counts * SIZE).repeat_interleave(KV_HEADS)
    new = _signed(queries, _signs(queries))
    scores = index_score(new, keys.flatten(0, 1), places, rows).unflatten(0, (3, KV_HEADS))
    found = scores[:, :, 0].unflatten(-1, (-1, SIZE)).amax(-1)
    expected = _best_in_place(queries, keys, table, counts)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(found[row, :, :count], expected[row, :, :count])
