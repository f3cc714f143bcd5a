"""Turning hisparse on and off for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.transformers.attention import IMPLEMENTATION, register
from hisparse.transformers.cache import HiSparseCache
from hisparse.transformers.model_shape import text_config

__all__ = ["disable", "enable"]

#: Enabled model to the attention implementation that it had.
_before: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def enable(
    model: Any, config: HiSparseConfig | Mapping[str, Any] | None = None, **options: Any
) -> HiSparseCache:
    """Let ``model`` attend with hisparse, and make a cache for it.

    Args:
        model: a decoder of transformers that attends through its ``AttentionInterface``.
        config: the settings.
        options: as for :class:`HiSparseCache`.

    Returns:
        To be passed as ``past_key_values``. More caches may be made for the model.

    Raises:
        ConfigError: the model, a setting or a size cannot be used; the model is as it was.
        CapacityError: the cache does not fit into memory; the model is as it was.
    """
    cache = HiSparseCache(model, config, **options)
    register()
    before = _implementation(model)
    if before != IMPLEMENTATION:
        model.set_attn_implementation(IMPLEMENTATION)
        if _implementation(model) != IMPLEMENTATION:
            raise ConfigError(
                f"model: got {type(model).__name__}, which does not attend through transformers' "
                "AttentionInterface, expected a model that does (such as llama, qwen2, qwen3)"
            )
        _before[model] = before
    return cache


def disable(model: Any) -> None:
    """Let ``model`` attend as it did before :func:`enable`; nothing happens if it still does."""
    before = _before.pop(model, None)
    if before is not None:
        model.set_attn_implementation(before)


def _implementation(model: Any) -> str:
    name: str = text_config(model)._attn_implementation
    return name
