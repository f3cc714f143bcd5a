"""Predicted queries of SGLang's models, on layers that are built like theirs."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hisparse.errors import ConfigError
from hisparse.sglang.foresight import LayerForesight, foreseen_layers

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
    def __init__(self, backend: Backend, norm: Callable[[int], nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.input_layernorm = norm(WIDTH)
        nn.init.normal_(self.input_layernorm.weight)
        self.self_attn = Attention(backend)


class Backend:
    """What a backend does with what layers hand over."""

    def __init__(self, blind: int | None = None, selecting: Container[int] = range(LAYERS)) -> None:
        torch.manual_seed(0)
        self.model = SimpleNamespace(model=SimpleNamespace(layers=nn.ModuleList()))
        self.model.model.layers.extend(Layer(self) for _ in range(LAYERS))
        if blind is not None:
            self.model.model.layers[0].input_layernorm.weight.data[blind] = 0
        self.foreseen: list[tuple[int, Tensor]] = []
        self.attended = 0
        self.foresight = LayerForesight(
            self.model,
            lambda layer_id, q: self.foreseen.append((layer_id, q)),
            lambda layer_id: layer_id in selecting,
        )

    def attend(self, q: Tensor) -> Tensor:
        self.foresight.stop_at(q)
        self.attended += 1
        return q

    def forward(self, hidden: Tensor, *, decode: bool, named: int = 3) -> list[Tensor]:
        """All layers get the same, as if none of them added anything.

        Args:
            hidden: ``[T, WIDTH]``.
            decode: whether it is a decode step.
            named: arguments of attention, from the last, that are not passed by position.
        """
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decode))
        names = ["positions", "hidden_states", "forward_batch"][3 - named :]
        outs = []
        for layer in self.model.model.layers:
            values = [torch.arange(len(hidden)), layer.input_layernorm(hidden), batch]
            placed, rest = values[: 3 - named], values[3 - named :]
            outs.append(layer.self_attn(*placed, **dict(zip(names, rest, strict=True))))
        return outs


@pytest.mark.parametrize("named", range(4))
def test_layers_that_add_nothing_are_predicted(named: int) -> None:
    backend = Backend()
    queries = backend.forward(torch.randn(5, WIDTH), decode=True, named=named)
    assert [layer_id for layer_id, _ in backend.foreseen] == [1, 2]
    for layer_id, q in backend.foreseen:
        torch.testing.assert_close(q, queries[layer_id])
    assert backend.attended == LAYERS, "those that were asked did not attend"


def test_a_channel_that_a_layer_does_not_look_at_tells_nothing() -> None:
    backend = Backend(blind=3)
    backend.forward(torch.randn(2, WIDTH), decode=True)
    assert all(torch.isfinite(q).all() for _, q in backend.foreseen)


def test_layers_that_do_not_select_are_not_asked() -> None:
    backend = Backend(selecting=[0, 2])
    backend.forward(torch.randn(2, WIDTH), decode=True)
    assert [layer_id for layer_id, _ in backend.foreseen] == [2]


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
        foreseen_layers(model)
    assert "\n" not in str(caught.value)


class Quantising(nn.RMSNorm):
    """Returns what the projection behind it takes in eight bits: values and their scale."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).to(torch.float8_e4m3fn), torch.ones(())


class AddingOne(nn.RMSNorm):
    """As Gemma's norms: the factor is the weight and one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.rms_norm(x, (WIDTH,))


class WithBias(nn.LayerNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.init.normal_(self.bias)


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        pytest.param(Quantising, "returns a tuple", id="quantised"),
        pytest.param(AddingOne, "has a bias or adds to its weight", id="gemma"),
        pytest.param(WithBias, "has a bias or adds to its weight", id="starcoder2"),
    ],
)
def test_norms_that_are_no_factors_are_refused(norm: type[nn.Module], why: str) -> None:
    backend = Backend()
    backend.model.model.layers[1] = Layer(backend, norm)
    expected = rf'speculate: got "layer".*{why}.*expected.*or "step" or null'
    with pytest.raises(ConfigError, match=expected) as caught:
        foreseen_layers(backend.model)
    assert "\n" not in str(caught.value)


def test_a_norm_without_a_bias_is_a_factor() -> None:
    backend = Backend()
    for number in range(LAYERS):
        norm = partial(nn.LayerNorm, bias=False)
        backend.model.model.layers[number] = Layer(backend, norm)
    assert len(foreseen_layers(backend.model)) == LAYERS


def test_attention_that_takes_no_hidden_states_is_refused() -> None:
    model = Backend().model
    model.model.layers[2].self_attn.forward = lambda x, forward_batch: x
    with pytest.raises(ConfigError, match="a self_attn without hidden_states, expected"):
        foreseen_layers(model)
