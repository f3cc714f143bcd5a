"""The attention and mask functions that hisparse registers with transformers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from hisparse.errors import HiSparseError

__all__ = ["IMPLEMENTATION", "register", "tag_keys"]

#: Name of the attention implementation in transformers.
IMPLEMENTATION = "hisparse"

#: Attribute of a key tensor that holds its ``_KeyOrigin``.
_TAG = "_hisparse_cache"

#: Arguments that change attention, and their values for plain causal attention.
_PLAIN_CAUSAL = {"sliding_window": None, "softcap": None, "s_aux": None, "position_bias": None}


class _AttendingCache(Protocol):
    """The part of ``HiSparseCache`` that the attention function calls."""

    def attend(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
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
        kwargs: options that change attention are rejected, others ignored.

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
    other = sorted(name for name, plain in _PLAIN_CAUSAL.items() if kwargs.get(name) is not plain)
    if other or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        options = ", ".join(other) or "is_causal=False"
        raise HiSparseError(
            f"layer {origin.layer_id}: got attention with {options}, expected plain causal "
            "attention"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return origin.cache.attend(origin.layer_id, query, key, value, attention_mask, scale), None


def _mask(
    *, mask_function: Any, attention_mask: Tensor | None, use_vmap: bool = False, **_: Any
) -> Tensor | None:
    """Return the padding mask unchanged, ``[B, columns] bool``: the engine is causal by itself."""
    if use_vmap or mask_function is not causal_mask_function:
        raise HiSparseError("mask: got a mask function of the model's, expected plain causal")
    return attention_mask


def register() -> None:
    """Register the attention and mask functions with transformers; may be called repeatedly."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
