"""Turns hisparse on and off for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.transformers.attention import IMPLEMENTATION, register
from hisparse.transformers.cache import HiSparseCache
from hisparse.transformers.model_shape import text_config

#: The attention implementation of each enabled model before :func:`enable`.
_previous: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def enable(
    model: Any, config: HiSparseConfig | Mapping[str, Any] | None = None, **options: Any
) -> HiSparseCache:
    """Set the model's attention implementation to hisparse and make a cache for the model.

    Args:
        model: a transformers decoder that uses the ``AttentionInterface``.
        config: the settings.
        options: arguments of :class:`HiSparseCache`.

    Returns:
        A cache to pass as ``past_key_values``. The model works with any number of caches.

    Raises:
        ConfigError: the model, a setting or a size is not supported; the model is unchanged.
        CapacityError: the cache does not fit into memory; the model is unchanged.
    """
    cache = HiSparseCache(model, config, **options)
    register()
    previous = _implementation(model)
    if previous != IMPLEMENTATION:
        model.set_attn_implementation(IMPLEMENTATION)
        if _implementation(model) != IMPLEMENTATION:
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
