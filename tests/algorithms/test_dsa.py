"""The lightning indexer: the tokens that Hugging Face's DeepSeek-V3.2 attends, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from hisparse.algorithms import DecodeStep, PrefillStep
from hisparse.algorithms.dsa import DSA
from hisparse.errors import ConfigError, HiSparseError
from hisparse.kernels.index.reference import stored_to_float
from hisparse.testing import Request, Simulator
from hisparse.testing.simulator import INDEXER_DIM
from hisparse.types import IndexerInputs, Selection
from tests.hf_indexer import inputs_of, scores_of

LAYERS, TOP_K, LENGTH, PROMPT = 2, 24, 150, 110


class Indexed:
    """Records inputs and indices of a model's indexers, per layer."""

    def __init__(self, index_heads: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.inputs: list[IndexerInputs] = []
        self.indices: list[Tensor] = []
        config = DeepseekV32Config(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            first_k_dense_replace=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            index_topk=TOP_K,
            index_n_heads=index_heads,
            index_head_dim=INDEXER_DIM,
        )
        model = DeepseekV32ForCausalLM(config).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, weight.shape[1] ** -0.5)
            for layer in model.model.layers:
                layer.self_attn.indexer.register_forward_hook(self._see)
            model(torch.randint(0, 128, (1, LENGTH)), use_cache=False)

    def _see(self, indexer: DeepseekV32Indexer, given: tuple[Tensor, ...], out: Tensor) -> None:
        self.inputs.append(inputs_of(indexer, given))
        self.indices.append(out[0].long())


class Chosen:
    """Records the tokens that the algorithm chose for each query, by layer and position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        topk, prefill = DSA.retrieve_topk, DSA.select_prefill

        def retrieve(dsa: DSA, queries: Tensor, layer: int, step: DecodeStep) -> Selection:
            selection = topk(dsa, queries, layer, step)
            position = int(step.num_pages[0])
            pages = selection.pages[0, 0].tolist()
            tail = [position] if selection.lengths[0, 0] < step.policy.max_pages else []
            self.tokens[layer, position] = [p for p in pages if p >= 0] + tail
            return selection

        def select_prefill(dsa: DSA, layer: int, step: PrefillStep) -> Tensor | None:
            chosen = prefill(dsa, layer, step)
            for t in range(step.length):
                position = step.start + t
                row = range(position + 1) if chosen is None else chosen[t].tolist()
                self.tokens[layer, position] = [p for p in row if p >= 0]
            return chosen

        monkeypatch.setattr(DSA, "retrieve_topk", retrieve)
        monkeypatch.setattr(DSA, "select_prefill", select_prefill)


def simulator(**changes: object) -> Simulator:
    options = {"num_sink_pages": 0, "num_recent_pages": 0, "algorithm": DSA(index_dtype="float32")}
    return Simulator(
        scope="layer",
        page_size=1,
        budget=TOP_K,
        device_buffer=2 * TOP_K,
        max_row=3 * TOP_K,
        host_pages=4 * LENGTH,
        staging_pages=16,
        **(options | changes),
    )


def serve(sim: Simulator, request: Request, *chunks: int) -> Tensor:
    """Prefill in chunks, decode the rest: outputs ``[L, n, Hq, D]``."""
    outs = [sim.prefill((request, chunk))[0] for chunk in chunks]
    while request.done < request.length:
        outs.append(sim.decode(request))
    return torch.cat(outs, dim=1)


def attend(sim: Simulator, request: Request, chosen: dict[tuple[int, int], list[int]]) -> Tensor:
    """Attention in float64 of every position over its chosen tokens, ``[L, n, Hq, D]``."""
    hidden = torch.ones(sim.layers, request.length, request.length, dtype=torch.bool)
    for (layer, position), tokens in chosen.items():
        hidden[layer, position, tokens] = False
    q, k, v = (x.double() for x in (request.q, request.k, request.v))
    k, v = (x.repeat_interleave(sim.spec.group_size, dim=2) for x in (k, v))
    logits = torch.einsum("lqhd,lkhd->lhqk", q, k) * sim.scale
    weights = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return torch.einsum("lhqk,lkhd->lqhd", weights, v)


def with_indexer(request: Request, model: Indexed) -> Request:
    request.indexer = IndexerInputs(*(torch.stack(x) for x in zip(*model.inputs, strict=True)))
    return request


@pytest.mark.parametrize("chunks", [(PROMPT,), (20, 50, 13, 27)], ids=["whole", "chunks"])
@pytest.mark.parametrize("heads", [4, 16])
def test_the_tokens_are_those_of_hugging_face(
    heads: int, chunks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chosen, sim = Indexed(heads, seed=heads), Chosen(monkeypatch), simulator()
    request = with_indexer(sim.request(1, LENGTH, seed=1), model)
    out = serve(sim, request, *chunks)
    compared = without_tail = 0
    for layer in range(LAYERS):
        scores = scores_of(model.inputs[layer])
        for position in range(LENGTH):
            seen = min(position + 1, TOP_K)
            expected = set(model.indices[layer][position][:seen].tolist())
            got = chosen.tokens[layer, position]
            assert len(got) == len(set(got)) == seen
            ranked = scores[position].sort(descending=True).values
            # Equal scores at the limit, of products that are all negative: any of them is right.
            tied = position >= TOP_K and ranked[TOP_K - 1] - ranked[TOP_K] < 1e-6
            if tied:
                assert_close(scores[position][got].sort().values, ranked[:seen].flip(0))
            else:
                assert set(got) == expected, (layer, position)
                compared += position >= TOP_K
                without_tail += position not in expected
    assert compared > 0.95 * LAYERS * (LENGTH - TOP_K)
    assert without_tail > 0, "the new token is to be left out now and then"
    assert_close(out.double(), attend(sim, request, chosen.tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [(PROMPT,), (20, 50, 40)], ids=["whole", "chunks"])
def test_layers_without_an_indexer_attend_what_the_one_before_selected(
    chunks: tuple[int, ...],
) -> None:
    """As if they had the same indexer, but without its keys."""
    shared, own = (simulator(layers=4, unindexed=x, checked=False) for x in ((1, 3), ()))
    asked, same = (sim.request(1, LENGTH, seed=5) for sim in (shared, own))
    for stream in same.indexer:
        stream[[1, 3]] = stream[[0, 2]]
    for stream in asked.indexer:
        stream[[1, 3]] = torch.nan
    assert torch.equal(serve(shared, asked, *chunks), serve(own, same, *chunks))
    stored = [sim.representations.tensors["index_key"].nbytes for sim in (shared, own)]
    assert stored[1] == 2 * stored[0]
    selections = [sim.coordinator.stats().selections for sim in (shared, own)]
    assert selections[1] == 2 * selections[0] > 0


def test_of_equal_scores_the_first_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunks in ((PROMPT,), (37, 30, 43)):
        chosen, sim = Chosen(monkeypatch), simulator()
        request = sim.request(1, LENGTH, seed=2)
        # No product is positive, so all scores are 0; two tokens have one that is.
        request.indexer.keys[:] = -1
        request.indexer.queries[:] = 1
        request.indexer.weights[:] = 1
        request.indexer.keys[:, [70, 80]] = 1
        serve(sim, request, *chunks)
        for (_, position), tokens in chosen.tokens.items():
            best = [p for p in (70, 80) if p <= position]
            rest = [p for p in range(position + 1) if p not in best]
            assert sorted(tokens) == sorted(best + rest[: TOP_K - len(best)])


def test_sinks_and_recents_are_kept_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, sim = Chosen(monkeypatch), simulator(num_sink_pages=2, num_recent_pages=3)
    serve(sim, sim.request(1, LENGTH, seed=3), 60, PROMPT - 60)
    for (_, position), tokens in chosen.tokens.items():
        kept = {0, 1, *range(position - 3, position + 1)} & set(range(position + 1))
        assert kept <= set(tokens)
        assert len(tokens) == min(position + 1, TOP_K)


def test_fp8_keys_have_a_scale_that_is_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Indexed(16, seed=16)
    chosen, sim = Chosen(monkeypatch), simulator(algorithm=DSA())
    request = with_indexer(sim.request(1, LENGTH, seed=1), model)
    serve(sim, request, PROMPT)
    stored = sim.representations.tensors
    assert {name: t.dtype for name, t in stored.items()} == {
        "index_key": torch.float8_e4m3fn,
        "index_scale": torch.float32,
    }
    pages = torch.tensor(request.host_pages)
    scale = stored["index_scale"][:, pages]
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    keys = stored["index_key"][:, pages].float() * scale[..., None]
    true = request.indexer.keys
    # Three bits of mantissa; below the least exponent, a fixed step.
    assert ((keys - true).abs() <= true.abs() / 16 + scale[..., None] * 2**-10).all()
    same = total = 0
    for (layer, position), tokens in chosen.tokens.items():
        if position >= TOP_K:
            same += len(set(tokens) & set(model.indices[layer][position].tolist()))
            total += TOP_K
    assert same > 0.95 * total, f"{same} of {total} tokens are those of exact keys"


def test_what_it_cannot_do_is_refused() -> None:
    sim = simulator()
    plain = replace(sim.policy, kv=replace(sim.spec, index_head_dim=0))
    with pytest.raises(ConfigError, match="model without an indexer, expected one such as"):
        DSA().representations(plain)
    request = sim.request(1, 10, seed=0)
    sim.coordinator.forward_begin(sim.next_chunks((request, 5)))
    with pytest.raises(HiSparseError, match="got no indexer inputs from the model"):
        sim.coordinator.attention(0, *(x[0, :5] for x in request.streams[:3]))


def test_every_fp8_number_is_read_as_it_is() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()]
    assert len(numbers) == 254
    assert torch.equal(stored_to_float(numbers), numbers.float())
