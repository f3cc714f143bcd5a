"""The attention and mask functions that hisparse registers with transformers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from hisparse.errors import HiSparseError
from hisparse.types import AttentionRule

#: Name of the attention implementation in transformers.
IMPLEMENTATION = "hisparse"

#: Attribute of a key tensor that holds its ``_KeyOrigin``.
_TAG = "_hisparse_cache"


class _AttendingCache(Protocol):
    """The part of ``HiSparseCache`` that the attention function calls."""

    def attend(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        rule: AttentionRule,
        sinks: Tensor | None,
    ) -> Tensor: ...


class _KeyOrigin(NamedTuple):
    """The cache and the layer that a key tensor belongs to."""

    cache: _AttendingCache
    layer_id: int


def tag_keys(keys: Tensor, cache: _AttendingCache, layer_id: int) -> Tensor:
    """Store ``cache`` and ``layer_id`` on a layer's new keys, for the attention function.

    A model passes its cache only to ``update``, and passes the keys that ``update`` returns to the
    attention function. The tag on the keys identifies the cache without any global state.
    """
    vars(keys)[_TAG] = _KeyOrigin(cache, layer_id)
    return keys


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
        key, value: ``[B, Hkv, T, D]``, new in this forward; tagged by :func:`tag_keys`.
        attention_mask: ``[B, columns] bool``, False at padding; None if no column is padding.
        scaling: softmax scale; None for ``D ** -0.5``.
        dropout: must be 0.
        kwargs: ``sliding_window``, ``softcap`` and ``s_aux`` (sinks) are the layer's; other options
            that change attention are rejected, the rest is ignored.

    Returns:
        ``[B, T, Hq, D]``, and None in place of attention weights.
    """
    origin: _KeyOrigin | None = vars(key).get(_TAG)
    if origin is None:
        raise HiSparseError(
            "past_key_values: got keys without a HiSparseCache, expected the cache that enable "
            "returns: pass past_key_values=cache, or call hisparse.transformers.disable(model)"
        )
    if query.requires_grad or dropout:
        raise HiSparseError(
            f"attention got a query with requires_grad={query.requires_grad} and dropout="
            f"{dropout}, expected inference: use model.eval() and torch.no_grad()"
        )
    biased = kwargs.get("position_bias") is not None
    if biased or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        option = "position_bias" if biased else "is_causal=False"
        raise HiSparseError(
            f"layer {origin.layer_id}: got attention with {option}, expected causal attention "
            "without it"
        )
    rule = AttentionRule(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        logit_cap=kwargs.get("softcap") or 0.0,
        window=kwargs.get("sliding_window") or 0,
    )
    out = origin.cache.attend(
        origin.layer_id, query, key, value, attention_mask, rule, kwargs.get("s_aux")
    )
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


def register() -> None:
    """Register the attention and mask functions with transformers; may be called repeatedly."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
