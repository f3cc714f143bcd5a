"""Turns hisparse on and off for a model: registers its attention and its masks."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError
from hisparse.model_config import text_config
from hisparse.transformers.cache import HiSparseCache, key_origin
from hisparse.types import AttentionRule

#: Name of the attention implementation in transformers.
_IMPLEMENTATION = "hisparse"
#: The attention implementation of each enabled model before :func:`enable`.
_previous: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def enable(
    model: Any, config: HiSparseConfig | Mapping[str, Any] | None = None, **options: Any
) -> HiSparseCache:
    """Set the model's attention implementation to hisparse and make a cache for the model.

    Args:
        model: a transformers decoder that uses the ``AttentionInterface``.
        options: arguments of :class:`HiSparseCache`.

    Returns:
        A cache to pass as ``past_key_values``. The model works with any number of caches.

    Raises:
        ConfigError: the model, a setting or a size is not supported; the model is unchanged.
        CapacityError: the cache does not fit into memory; the model is unchanged.
    """
    cache = HiSparseCache(model, config, **options)
    AttentionInterface.register(_IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, _mask)
    previous = _implementation(model)
    if previous != _IMPLEMENTATION:
        model.set_attn_implementation(_IMPLEMENTATION)
        if _implementation(model) != _IMPLEMENTATION:
            raise ConfigError(
                f"model: got {type(model).__name__}, which does not attend through transformers' "
                "AttentionInterface, expected a model that does (such as llama, qwen2, qwen3)"
            )
        _previous[model] = previous
    return cache


def disable(model: Any) -> None:
    """Restore the attention implementation from before :func:`enable`, if there is one."""
    previous = _previous.pop(model, None)
    if previous is not None:
        model.set_attn_implementation(previous)


def _implementation(model: Any) -> str:
    name: str = text_config(model)._attn_implementation
    return name


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the cache and the new columns.

    Args:
        module: the model's attention layer.
        query: ``[B, Hq, T, D]``.
        key, value: ``[B, Hkv, T, D]``, new in this forward; tagged by :meth:`HiSparseCache.update`.
        attention_mask: ``[B, columns] bool``, False at padding; None if no column is padding.
        scaling: softmax scale; None for ``D ** -0.5``.
        dropout: must be 0.
        kwargs: ``sliding_window``, ``softcap`` and ``s_aux`` (sinks) are the layer's; other options
            that change attention are rejected, the rest is ignored.

    Returns:
        ``[B, T, Hq, D]``, and None in place of attention weights.
    """
    if (origin := key_origin(key)) is None:
        raise HiSparseError(
            "past_key_values: got keys without a HiSparseCache, expected the cache that enable "
            "returns: pass past_key_values=cache, or call hisparse.transformers.disable(model)"
        )
    cache, layer_id = origin
    if query.requires_grad or dropout:
        raise HiSparseError(
            f"attention got a query with requires_grad={query.requires_grad} and dropout="
            f"{dropout}, expected inference: use model.eval() and torch.no_grad()"
        )
    biased = kwargs.get("position_bias") is not None
    if biased or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        option = "position_bias" if biased else "is_causal=False"
        raise HiSparseError(
            f"layer {layer_id}: got attention with {option}, expected causal attention without it"
        )
    rule = AttentionRule(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        logit_cap=kwargs.get("softcap") or 0.0,
        window=kwargs.get("sliding_window") or 0,
    )
    out = cache.attend(layer_id, query, key, value, attention_mask, rule, kwargs.get("s_aux"))
    return out, None


def _mask(
    *,
    mask_function: Any,
    attention_mask: Tensor | None,
    use_vmap: bool = False,
    local_size: int | None = None,
    **_: Any,
) -> Tensor | None:
    """Return the padding mask unchanged, ``[B, columns] bool``: the engine applies the others.

    Args:
        mask_function: whether a query attends a key, by their positions.
        attention_mask: the padding mask.
        use_vmap: whether the model has added masks of its own.
        local_size: tokens of a sliding window; None: no window.
    """
    window = local_size is not None and _is_window(mask_function, local_size)
    if use_vmap or not (window or mask_function is causal_mask_function):
        raise HiSparseError(
            "mask: got a mask function of the model's, expected a causal one, with a sliding "
            "window or without"
        )
    return attention_mask


def _is_window(mask_function: Any, size: int) -> bool:
    """Whether a mask function hides later keys, and keys ``size`` or more before the query."""
    zero, query, key = torch.tensor([[0, 0, 0, 0], [0, 0, size, size], [1, 0, 1, 0]])
    seen: list[bool] = mask_function(zero, zero, query, key).tolist()
    return seen == [False, True, True, False]
