"""Predicted queries of SGLang's models, on layers that are built like theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hisparse.errors import ConfigError
from hisparse.sglang.foresight import LayerForesight

WIDTH, LAYERS = 24, 3


class Attention(nn.Module):
    """Projects, then attends by a backend."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self._backend = [backend]

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        return self._backend[0].attend(self.qkv_proj(hidden_states))


class Layer(nn.Module):
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        nn.init.normal_(self.input_layernorm.weight)
        self.self_attn = Attention(backend)


class Backend:
    """What a backend does with what layers hand over."""

    def __init__(self, blind: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = SimpleNamespace(model=SimpleNamespace(layers=nn.ModuleList()))
        self.model.model.layers.extend(Layer(self) for _ in range(LAYERS))
        if blind is not None:
            self.model.model.layers[0].input_layernorm.weight.data[blind] = 0
        self.foreseen: list[tuple[int, Tensor]] = []
        self.attended = 0
        self.foresight = LayerForesight(
            self.model, lambda layer_id, q: self.foreseen.append((layer_id, q))
        )

    def attend(self, q: Tensor) -> Tensor:
        self.foresight.stop_at(q)
        self.attended += 1
        return q

    def forward(self, hidden: Tensor, *, decode: bool) -> list[Tensor]:
        """All layers get the same, as if none of them added anything."""
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decode))
        return [
            layer.self_attn(
                positions=torch.arange(len(hidden)),
                hidden_states=layer.input_layernorm(hidden),
                forward_batch=batch,
            )
            for layer in self.model.model.layers
        ]


def test_layers_that_add_nothing_are_predicted() -> None:
    backend = Backend()
    queries = backend.forward(torch.randn(5, WIDTH), decode=True)
    assert [layer_id for layer_id, _ in backend.foreseen] == [1, 2]
    for layer_id, q in backend.foreseen:
        torch.testing.assert_close(q, queries[layer_id])
    assert backend.attended == LAYERS, "those that were asked did not attend"


def test_a_channel_that_a_layer_does_not_look_at_tells_nothing() -> None:
    backend = Backend(blind=3)
    backend.forward(torch.randn(2, WIDTH), decode=True)
    assert all(torch.isfinite(q).all() for _, q in backend.foreseen)


def test_prompts_are_not_predicted() -> None:
    backend = Backend()
    backend.forward(torch.randn(5, WIDTH), decode=False)
    assert not backend.foreseen
    assert backend.attended == LAYERS


@pytest.mark.parametrize("missing", ["input_layernorm", "self_attn"])
def test_layers_of_another_kind_are_refused(missing: str) -> None:
    model = Backend().model
    delattr(model.model.layers[1], missing)
    with pytest.raises(ConfigError, match=r'speculate: got "layer".*"step" or null') as caught:
        LayerForesight(model, lambda layer_id, q: None)
    assert "\n" not in str(caught.value)
