"""The attention function that transformers calls, and the mask that it gets."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from hisparse.errors import HiSparseError

__all__ = ["IMPLEMENTATION", "hand_over", "register"]

#: Name of the attention implementation in transformers.
IMPLEMENTATION = "hisparse"

_TAG = "_hisparse_cache"

#: What a model may ask of attention beyond plain causal attention: argument to value that is plain.
_PLAIN = {"sliding_window": None, "softcap": None, "s_aux": None, "position_bias": None}


class _Serves(Protocol):
    """A cache, as this module sees it."""

    def attend(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor: ...


class _Handed(NamedTuple):
    cache: _Serves
    layer_id: int


def hand_over(keys: Tensor, cache: _Serves, layer_id: int) -> Tensor:
    """Tie the new keys of a layer to the cache that got them.

    A model passes its cache to ``update`` only, and hands the keys that it returned to attention:
    that is how attention knows the cache, without any state of the process.
    """
    vars(keys)[_TAG] = _Handed(cache, layer_id)
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
    """``query [B, Hq, T, D]``, ``key, value [B, Hkv, T, D]`` of this forward -> ``[B, T, Hq, D]``.

    ``attention_mask [B, columns] bool`` is False at padding.
    """
    handed: _Handed | None = vars(key).get(_TAG)
    if handed is None:
        raise HiSparseError(
            "attention got keys of no HiSparseCache; pass past_key_values=HiSparseCache(...), as "
            "enable returns it, or call hisparse.transformers.disable(model)"
        )
    if query.requires_grad or dropout:
        raise HiSparseError(
            f"attention got a query with requires_grad={query.requires_grad} and dropout="
            f"{dropout}, expected inference: use model.eval() and torch.no_grad()"
        )
    other = sorted(name for name, plain in _PLAIN.items() if kwargs.get(name) is not plain)
    if other or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        what = ", ".join(other) or "is_causal=False"
        raise HiSparseError(f"layer {handed.layer_id} attends with {what}, expected plain causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return handed.cache.attend(handed.layer_id, query, key, value, attention_mask, scale), None


def _mask(
    *, mask_function: Any, attention_mask: Tensor | None, use_vmap: bool = False, **_: Any
) -> Tensor | None:
    """The padding mask as it is, ``[B, columns] bool``: causality needs no mask here."""
    if use_vmap or mask_function is not causal_mask_function:
        raise HiSparseError("the model asks for a mask of its own, expected a plain causal one")
    return attention_mask


def register() -> None:
    """Make the implementation known to transformers; more calls change nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
