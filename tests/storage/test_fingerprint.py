"""One fingerprint for one model, whichever front end arranges its weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hisparse.storage.fingerprint import fingerprint

SHAPES = {
    "self_attn.q_proj.weight": (64, 48), "self_attn.k_proj.weight": (32, 48),
    "self_attn.v_proj.weight": (32, 48), "self_attn.q_proj.bias": (64,),
    "self_attn.k_proj.bias": (32,), "self_attn.v_proj.bias": (32,),
    "mlp.gate_proj.weight": (96, 48), "mlp.up_proj.weight": (96, 48),
    "mlp.down_proj.weight": (48, 96), "input_layernorm.weight": (48,),
}  # fmt: skip


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Two layers and embeddings, under the names of transformers."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (50, 48), "model.norm.weight": (48,)}
    return {n: torch.randn(shape, generator=rng).to(dtype) for n, shape in shapes.items()}


def found(params: dict[str, Tensor]) -> str:
    return fingerprint({"model_type": "llama"}, params.items())


def joined(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """As SGLang arranges them: joined, renamed, in another order, and a padded vocabulary."""
    params = dict(params)
    for layer in (0, 1):
        for kind in ("weight", "bias"):
            names = [f"model.layers.{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"]
            parts = [params.pop(name) for name in names]
            params[f"model.layers.{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        names = [f"model.layers.{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")]
        params[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = torch.cat(
            [params.pop(name) for name in names]
        )
    embedding = params["model.embed_tokens.weight"]
    params["model.embed_tokens.weight"] = torch.cat([embedding, embedding.new_zeros(14, 48)])
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_and_padded_weights_are_the_same(dtype: torch.dtype) -> None:
    params = weights(dtype=dtype)
    assert found(joined(params)) == found(params)
    assert found(joined(weights(seed=1, dtype=dtype))) != found(params)


def test_weights_of_8_bits() -> None:
    params = {n: x.to(torch.float8_e4m3fn) for n, x in weights().items()}
    both = {n: x.view(torch.float8_e4m3fn) for n, x in joined(
        {n: x.view(torch.uint8) for n, x in params.items()}
    ).items()}  # fmt: skip
    assert found(both) == found(params) != found(weights())


def test_experts_count_one_by_one() -> None:
    experts = torch.randn(4, 8, 48)
    one = {"layers.3.mlp.experts.gate_up_proj": experts}
    apart = {f"model.layers.3.mlp.experts.{i}.up_proj.weight": x for i, x in enumerate(experts)}
    assert found(one) == found(apart)
    experts[2, 5, 7] += 1
    assert found(one) != found(apart | {"model.layers.3.mlp.experts.2.up_proj.weight": experts[1]})


@pytest.mark.parametrize("name", [*SHAPES, "embed"])
def test_an_element_counts_and_so_does_its_place_in_a_row(name: str) -> None:
    params = weights()
    before = found(params)
    weight = params.get(f"model.layers.1.{name}", params["model.embed_tokens.weight"])
    weight.view(-1)[5] += 1
    changed = found(params)
    weight.view(-1)[:16] = weight.view(-1)[:16].flip(0)
    assert len({before, changed, found(params)}) == 3


def test_rows_that_change_places_in_a_head_are_noticed() -> None:
    """As in conversions that arrange the halves of rotary embeddings otherwise."""
    params = weights()
    before = found(params)
    keys = params["model.layers.1.self_attn.k_proj.weight"]
    params["model.layers.1.self_attn.k_proj.weight"] = (
        keys.view(2, 8, 2, 48).transpose(1, 2).reshape(32, 48)
    )
    assert found(params) != before


def test_layers_that_change_places_are_noticed() -> None:
    params = weights()
    swapped = {
        name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1."): x
        for name, x in params.items()
    }
    assert found(swapped) != found(params)


def test_a_tied_weight_counts_once() -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(8, 16), "head": nn.Linear(16, 8, bias=False)})
    tied["head"].weight = tied["embed"].weight
    both = fingerprint({}, tied.named_parameters(remove_duplicate=False))
    assert both == fingerprint({}, tied.named_parameters())
    assert both == fingerprint({}, tied["embed"].named_parameters())
