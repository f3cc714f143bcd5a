"""QSA: the tokens that transformers' Qwen4-Exp attends, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextQSAIndexer,
    Qwen4ExpTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from hisparse.algorithms import DecodeStep, PrefillStep
from hisparse.algorithms.qsa import QSA
from hisparse.testing import Request, Simulator
from hisparse.testing.simulator import INDEXER_DIM
from hisparse.types import BlockIndexerInputs, IndexerInputs, Selection

LAYERS, SIZE, BUDGET, LENGTH, PROMPT = 2, 4, 24, 190, 110
#: Rotary positions of the three axes do not count tokens: an image stands among them.
POSITIONS = torch.stack([torch.arange(LENGTH) // n + 3 for n in (1, 2, 3)], 1)


class Indexed:
    """The indexers of a model, with random hidden states ``[L, n, hidden size]``."""

    def __init__(self, index_heads: int, seed: int) -> None:
        torch.manual_seed(seed)
        config = Qwen4ExpTextConfig(
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            layer_types=["indexed_attention"] * LAYERS,
            indexer_n_heads=index_heads,
            indexer_kv_heads=1,
            indexer_head_dim=INDEXER_DIM,
            indexer_budget=BUDGET,
            indexer_compress_ratio=SIZE,
        )
        self.indexers = [Qwen4ExpTextQSAIndexer(config, layer) for layer in range(LAYERS)]
        for module in self.indexers:
            for weight in module.parameters():
                torch.nn.init.normal_(weight, 0, 0.3 if weight.ndim == 1 else 0.1)
        self.rotary = Qwen4ExpTextRotaryEmbedding(config)
        self.hidden = torch.randn(LAYERS, LENGTH, 64)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[1, n, rotary width]`` each, of ``positions [n, 3]``."""
        cos, sin = self.rotary(self.hidden, positions.T[:, None])
        return cos, sin

    @torch.no_grad()
    def inputs(self, layer: int) -> IndexerInputs:
        """Queries, keys of tokens and weights of a layer."""
        module = self.indexers[layer]
        qk = module.index_qk_proj(self.hidden[layer]).unflatten(-1, (-1, INDEXER_DIM))
        cos, sin = self.cos_sin(POSITIONS)
        queries = module.q_layernorm(qk[:, :-1])
        queries = apply_rotary_pos_emb(queries[None], cos=cos, sin=sin, unsqueeze_dim=2)[0]
        weights = torch.full(queries.shape[:2], INDEXER_DIM**-0.5)
        return IndexerInputs(queries, qk[:, -1], weights)

    @torch.no_grad()
    def compress(self, layer: int, keys: Tensor, first: Tensor) -> Tensor:
        """``keys [N, S, Di]`` and ``first [N, 3]`` -> ``[N, Di]``."""
        cos, sin = self.cos_sin(first)
        normed = self.indexers[layer].k_layernorm(keys.mean(1))
        return apply_rotary_pos_emb(normed[:, None], cos=cos[0], sin=sin[0])[:, 0]

    @torch.no_grad()
    def selected(self, layer: int) -> Tensor:
        """``[n, n] bool``, the tokens that transformers' indexer selects for each query."""
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        embeddings = self.cos_sin(POSITIONS)
        hidden = self.hidden[layer][None]
        chosen = self.indexers[layer](hidden, embeddings, causal[None, None], None)
        return chosen[0, 0] & causal


class ModelSimulator(Simulator):
    """A simulator whose requests have a model's indexers."""

    model: Indexed

    def indexer_inputs(
        self, layer: int, parts: Sequence[tuple[Request, int, int]], *tensors: Tensor
    ) -> IndexerInputs:
        positions = torch.cat([POSITIONS[a:b] for _, a, b in parts])
        compress = partial(self.model.compress, layer)
        return BlockIndexerInputs.of(IndexerInputs(*tensors), positions, compress)


def simulator(model: Indexed, dtype: str = "float32", **changes: object) -> ModelSimulator:
    options: dict[str, object] = {"algorithm": QSA(index_dtype=dtype)}
    sim = ModelSimulator(
        scope="layer",
        page_size=SIZE,
        budget=BUDGET,
        device_buffer=BUDGET,
        max_row=2 * BUDGET,
        num_sink_pages=0,
        num_recent_pages=0,
        host_pages=LENGTH,
        staging_pages=5,
        **(options | changes),
    )
    sim.model = model
    return sim


def request_of(sim: ModelSimulator, slot: int = 1) -> Request:
    request = sim.request(slot, LENGTH, seed=1)
    inputs = [sim.model.inputs(layer) for layer in range(LAYERS)]
    request.indexer = IndexerInputs(*(torch.stack(x) for x in zip(*inputs, strict=True)))
    return request


def attend(sim: Simulator, request: Request, selected: Tensor) -> Tensor:
    """Attention in float64 over ``selected [L, n, n] bool``, ``[L, n, Hq, D]``."""
    q, k, v = (x.double() for x in (request.q, request.k, request.v))
    k, v = (x.repeat_interleave(sim.spec.group_size, dim=2) for x in (k, v))
    logits = torch.einsum("lqhd,lkhd->lhqk", q, k) * sim.scale
    weights = logits.masked_fill(~selected[:, None], -torch.inf).softmax(-1)
    return torch.einsum("lhqk,lkhd->lqhd", weights, v)


@pytest.mark.parametrize("chunks", [(PROMPT,), (20, 49, 2, 39)], ids=["whole", "chunks"])
@pytest.mark.parametrize("heads", [4, 16])
def test_the_output_is_attention_over_the_tokens_of_transformers(
    heads: int, chunks: tuple[int, ...]
) -> None:
    """In prefill and decoding, at up to eight times the budget."""
    sim = simulator(Indexed(heads, seed=heads))
    request = request_of(sim)
    outs = [sim.prefill((request, chunk))[0] for chunk in chunks]
    while request.done < LENGTH:
        outs.append(sim.decode(request))
    selected = torch.stack([sim.model.selected(layer) for layer in range(LAYERS)])
    counts = selected.sum(-1)[:, BUDGET:]
    assert counts.min() == BUDGET and counts.max() == BUDGET + SIZE - 1
    last = selected.diagonal(dim1=1, dim2=2)[:, SIZE - 1 :: SIZE]
    assert not last.all() and last.any(), "a full page competes with the others"
    error = (torch.cat(outs, 1).double() - attend(sim, request, selected)).abs()
    assert error.max() < 1e-4
    assert sim.coordinator.stats().miss_pages > 0


def test_what_waits_for_its_block_is_the_requests_own() -> None:
    """Requests that decode together, one in a slot that another had, or with its first pages."""
    model = Indexed(4, seed=7)
    alone = simulator(model)
    first = request_of(alone)
    alone.prefill((first, 90))
    expected = [alone.decode(first)[:, 0] for _ in range(12)]
    sim = simulator(model)
    other = request_of(sim)
    sim.prefill((other, 53))
    for _ in range(5):
        sim.decode(other)
    sim.end(other)
    again, beside = request_of(sim), request_of(sim, slot=2)
    sim.prefill((again, 90), (beside, 71))
    got = [sim.decode(beside, again)[:, 1] for _ in range(5)]
    # Retracted: the pages that are full stay, and the rest is computed again.
    kept = again.done // SIZE * SIZE
    sim.end(again)
    shared = request_of(sim, slot=3)
    shared.host_pages, shared.done = again.host_pages[: kept // SIZE], kept
    sim.prefill((shared, again.done - kept))
    got += [sim.decode(shared, beside)[:, 0] for _ in range(7)]
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_keys_in_fewer_bits_choose_nearly_the_same_tokens(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chosen = Indexed(4, seed=3), dict[tuple[int, int], set[int]]()

    def prefill(qsa: QSA, layer: int, step: PrefillStep) -> Tensor | None:
        positions = select_prefill(qsa, layer, step)
        for query, row in enumerate([] if positions is None else positions.tolist()):
            chosen[layer, step.start + query] = {token for token in row if token >= 0}
        return positions

    def decode(qsa: QSA, queries: Tensor, layer: int, step: DecodeStep) -> Selection:
        selection = retrieve(qsa, queries, layer, step)
        at, pages = int(step.seq_lens_cpu[0]) - 1, selection.pages[0, 0].tolist()
        if selection.lengths[0, 0] < step.policy.max_pages or at % SIZE < SIZE - 1:
            pages.append(at // SIZE)
        tokens = {page * SIZE + offset for page in pages if page >= 0 for offset in range(SIZE)}
        chosen[layer, at] = {token for token in tokens if token <= at}
        return selection

    select_prefill, retrieve = QSA.select_prefill, QSA.retrieve_topk
    monkeypatch.setattr(QSA, "select_prefill", prefill)
    monkeypatch.setattr(QSA, "retrieve_topk", decode)
    sim = simulator(model, dtype)
    request = request_of(sim)
    sim.prefill((request, PROMPT))
    while request.done < LENGTH:
        sim.decode(request)
    same = total = 0
    for layer in range(LAYERS):
        selected = model.selected(layer)
        for position in range(BUDGET + SIZE, LENGTH):
            expected = set(selected[position].nonzero()[:, 0].tolist())
            same += len(expected & chosen[layer, position])
            total += len(expected)
            assert len(chosen[layer, position]) == len(expected)
    assert same > 0.95 * total, f"{same} of {total}"
    stored = sim.representations.tensors
    assert stored["index_key"].dtype == getattr(torch, dtype)
    assert ("index_scale" in stored) == (dtype == "float8_e4m3fn")
