"""Predicted queries in SGLang: a layer's attention is asked what it would make of what the one
before gets.

What goes into a layer's attention is the residual stream through the layer's norm, whose weight is
a factor for each channel; with the next layer's weight in its place, it is nearly what goes into
that one, for layers add little (InfiniGen, https://arxiv.org/abs/2406.19707, section 4.1). Asked is
the model's own attention, up to where it would attend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

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

    def is_known(layer: Any) -> bool:
        norm, attention = getattr(layer, "input_layernorm", None), getattr(layer, "self_attn", None)
        return hasattr(norm, "weight") and hasattr(attention, "qkv_proj")

    if not layers or not all(map(is_known, layers)):
        raise ConfigError(
            f'speculate: got "layer" for {type(model).__name__}, expected a model whose layers '
            "have an input_layernorm with a weight and a self_attn with qkv_proj, "
            'or "step" or null'
        )
    return layers


class LayerForesight:
    """Hooks on the attention of a model's layers.

    Args:
        model: of SGLang, see :func:`foreseen_layers`.
        foresee: gets a layer's number, from 0, and ``[T, Hq * D]``, what its queries are likely to
            be, before the layer before it attends in a decode step.
    """

    def __init__(self, model: Any, foresee: Callable[[int, Tensor], None]) -> None:
        self._foresee = foresee
        self._is_asking = False
        layers = foreseen_layers(model)
        for layer_id, (layer, following) in enumerate(pairwise(layers), start=1):
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

        def ask(_: Any, args: Sequence[Any], given: Mapping[str, Any]) -> None:
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
