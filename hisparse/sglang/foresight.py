"""Predicted queries in SGLang: a layer's attention is asked what it would make of what the one
before gets.

What goes into a layer's attention is the residual stream through the layer's norm, whose weight is
a factor for each channel; with the next layer's weight in its place, it is nearly what goes into
that one, for layers add little (InfiniGen, https://arxiv.org/abs/2406.19707, section 4.1). Asked is
the model's own attention, up to where it would attend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import ConfigError

__all__ = ["LayerForesight", "foreseen_layers"]


class _Predicted(Exception):
    """Ends the attention of a layer that was only asked for its queries ``[T, Hq * D]``."""

    def __init__(self, queries: Tensor) -> None:
        super().__init__()
        self.queries = queries


def foreseen_layers(model: Any) -> list[Any]:
    """The decoder layers of a model of SGLang.

    Raises:
        ConfigError: they have not what queries can be predicted by.
    """
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    lacking = next((x for x in map(_lacking, layers) if x), None) if layers else "no layers"
    if lacking is not None:
        raise ConfigError(
            f'speculate: got "layer" for {type(model).__name__}, with {lacking}, expected layers '
            "with an input_layernorm that times its weight is all to a normalised vector, and a "
            'self_attn with qkv_proj that takes hidden_states and forward_batch; or "step" or null'
        )
    return layers


def _lacking(layer: Any) -> str | None:
    """What keeps a layer from being asked, and from being what another one is asked by."""
    norm, attention = getattr(layer, "input_layernorm", None), getattr(layer, "self_attn", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return "no input_layernorm with a weight"
    if not hasattr(attention, "qkv_proj"):
        return "no self_attn with qkv_proj"
    missing = {"hidden_states", "forward_batch"} - set(_argument_names(attention))
    if missing:
        return f"a self_attn without {min(missing)}"
    # Its mean is 0 and its mean square 1: what a norm makes of it is the weight, up to the signs.
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    with torch.no_grad():
        normed = norm(signs[None])
    if not isinstance(normed, Tensor):
        return f"an input_layernorm that returns a {type(normed).__name__} (quantised input)"
    if not torch.allclose(normed[0].float(), (signs * weight).float(), rtol=0.02, atol=1e-3):
        return "an input_layernorm that has a bias or adds to its weight"
    return None


def _argument_names(attention: Any) -> list[str]:
    return list(inspect.signature(attention.forward).parameters)


class LayerForesight:
    """Hooks on the attention of a model's layers.

    Args:
        model: of SGLang, see :func:`foreseen_layers`.
        foresee: gets a layer's number, from 0, and ``[T, Hq * D]``, what its queries are likely to
            be, before the layer before it attends in a decode step.
        selects: whether a layer with that number selects; the others are not asked.
    """

    def __init__(
        self,
        model: Any,
        foresee: Callable[[int, Tensor], None],
        selects: Callable[[int], bool],
    ) -> None:
        self._foresee = foresee
        self._is_asking = False
        layers = foreseen_layers(model)
        for layer_id, (layer, following) in enumerate(pairwise(layers), start=1):
            if not selects(layer_id):
                continue
            layer.self_attn.register_forward_pre_hook(
                self._hook(layer, following, layer_id), with_kwargs=True
            )

    def stop_at(self, queries: Tensor) -> None:
        """Called where a layer would attend: it goes no further if it was only asked."""
        if self._is_asking:
            raise _Predicted(queries)

    def _hook(
        self, layer: Any, following: Any, layer_id: int
    ) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], None]:
        own, other = layer.input_layernorm.weight, following.input_layernorm.weight
        # A channel that a layer does not look at tells nothing.
        factor = (other / own).where(own != 0, 0).detach()
        names = _argument_names(layer.self_attn)

        def ask(_: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
            given = {**dict(zip(names, args, strict=False)), **named}
            if self._is_asking or not given["forward_batch"].forward_mode.is_decode():
                return
            hidden: Tensor = given["hidden_states"]
            self._is_asking = True
            try:
                following.self_attn(**{**given, "hidden_states": hidden * factor})
            except _Predicted as predicted:
                self._foresee(layer_id, predicted.queries)
            finally:
                self._is_asking = False

        return ask
