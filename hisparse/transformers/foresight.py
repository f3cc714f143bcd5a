"""Predicted queries: a layer's attention is asked what it would make of what the layer before gets.

Layers add little to what they get, so the input of one, through the norm and the projection of the
next, gives nearly the query that the next layer is going to have (InfiniGen,
https://arxiv.org/abs/2406.19707, section 4.1). Asked is the model's own attention, up to where it
would attend: positions, biases and norms of queries are as the model has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hisparse.errors import ConfigError
from hisparse.transformers.attention import hand_over

__all__ = ["forget_layers", "watch_layers"]

#: Model to the hooks on its layers.
_watched: WeakKeyDictionary[Any, list[RemovableHandle]] = WeakKeyDictionary()


class _Predicted(Exception):
    """Ends the attention of a layer that was only asked for its queries ``[B, Hq, T, D]``."""

    def __init__(self, queries: Tensor) -> None:
        super().__init__()
        self.queries = queries


class _Probe:
    """Stands where a cache stands."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return hand_over(key_states, self, layer_idx), value_states

    def attend(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> NoReturn:
        raise _Predicted(q)


def watch_layers(model: Any) -> None:
    """Let caches that foresee know of each layer's queries a layer ahead, in decode steps.

    Args:
        model: a decoder of transformers; a second call changes nothing.

    Raises:
        ConfigError: it has no layers with a norm and attention of their own.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = list(getattr(decoder, "layers", ()))
    if not layers or not all(
        hasattr(x, "input_layernorm") and hasattr(x, "self_attn") for x in layers
    ):
        raise ConfigError(
            f'speculate: got "layer" for {type(model).__name__}, expected a model (and not only '
            'its configuration) whose layers have input_layernorm and self_attn, or "step" or null'
        )
    if model not in _watched:
        _watched[model] = [
            layer.register_forward_pre_hook(_predictor(following, layer_id), with_kwargs=True)
            for layer_id, (layer, following) in enumerate(pairwise(layers), start=1)
        ]


def forget_layers(model: Any) -> None:
    """Undo :func:`watch_layers`."""
    for handle in _watched.pop(model, ()):
        handle.remove()


def _predictor(layer: Any, layer_id: int) -> Any:
    """Called with what the layer before ``layer`` gets."""

    def predict(_: Any, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        cache: Any = given.get("past_key_values")
        hidden: Tensor = args[0] if args else given["hidden_states"]
        if hidden.shape[1] > 1 or not getattr(cache, "foresees", False):
            return
        if not cache.coordinator.selects(layer_id):
            return
        options = {**given, "past_key_values": _Probe()}
        options["hidden_states"] = layer.input_layernorm(hidden)
        try:
            layer.self_attn(**options)
        except _Predicted as predicted:
            cache.foresee(layer_id, predicted.queries)

    return predict
