"""Reads the shape of attention from a transformers model or its configuration."""

from __future__ import annotations

from typing import Any

import torch

from hisparse.errors import ConfigError
from hisparse.types import KVSpec

#: Attributes of configurations with attention that hisparse does not support, and its name.
_UNSUPPORTED = {
    "is_encoder_decoder": "an encoder and cross attention",
    "kv_lora_rank": "latent attention (MLA)",
    "num_kv_shared_layers": "layers that share K and V",
    "attention_chunk_size": "chunked attention",
}

_WINDOW_KIND = "sliding_attention"
#: Values of ``layer_types``.
_LAYER_KINDS = {"full_attention", _WINDOW_KIND}

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def text_config(model: Any) -> Any:
    """The configuration of a model's decoder.

    Args:
        model: a transformers model or its configuration.
    """
    return getattr(model, "config", model).get_text_config(decoder=True)


def read_dtype(model: Any) -> torch.dtype:
    """The dtype of a transformers model or of its configuration; float32 if it names none."""
    dtype = getattr(model, "dtype", None) or torch.float32
    # `save_pretrained` replaces a configuration's dtype by its name.
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def read_model_shape(
    model: Any, page_size: int, context_length: int | None = None
) -> tuple[KVSpec, float]:
    """Read the shape of the attention layers, and the softmax scale.

    Args:
        model: a transformers model or its configuration. A configuration does not name the scale:
            the function assumes ``head_dim ** -0.5``, and layers with another scale raise an error
            when they run.
        page_size: S, tokens per page of a selection.
        context_length: tokens, the longest sequence; a window that holds it is none. None: unknown.

    Raises:
        ConfigError: hisparse does not support the model's attention, or its layers differ.
    """
    config = text_config(model)
    name = config.model_type
    for attribute, feature in _UNSUPPORTED.items():
        if getattr(config, attribute, None):
            raise _unsupported(name, f"{feature} ({attribute}={getattr(config, attribute)})")
    other = sorted({*(getattr(config, "layer_types", None) or ())} - _LAYER_KINDS)
    if other:
        raise _unsupported(name, f"layers of other kinds ({', '.join(other)})")
    num_layers, q_heads, hidden = (_read_size(config, name, size) for size in _SIZES)
    dtype = read_dtype(model)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype: got {dtype}, expected float32, bfloat16 or float16")
    head_dim = getattr(config, "head_dim", None) or hidden // q_heads
    spec = KVSpec(
        num_layers=num_layers,
        num_q_heads=q_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or q_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
        page_size=page_size,
        logit_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        windows=_read_windows(config, num_layers, context_length),
    )
    return spec, _read_scale(model, name, head_dim)


def _read_windows(config: Any, num_layers: int, context_length: int | None) -> tuple[int, ...]:
    """``KVSpec.windows`` of a model."""
    window = getattr(config, "sliding_window", None) or 0
    if not window or (context_length is not None and window >= context_length):
        return ()
    # Without layer_types, a sliding window applies to all layers.
    kinds = getattr(config, "layer_types", None) or [_WINDOW_KIND] * num_layers
    windows = tuple(window if kind == _WINDOW_KIND else 0 for kind in kinds)
    return windows if any(windows) else ()


def _read_size(config: Any, name: str, size: str) -> int:
    value: int | None = getattr(config, size, None)
    if value is None:
        raise _unsupported(name, f"no MHA or GQA attention ({size} is not set)")
    return value


def _read_scale(model: Any, name: str, head_dim: int) -> float:
    modules = model.modules() if hasattr(model, "modules") else ()
    scales = {
        float(m.scaling) for m in modules if hasattr(m, "layer_idx") and hasattr(m, "scaling")
    }
    if len(scales) > 1:
        raise _unsupported(name, f"layers of {len(scales)} different softmax scales")
    return scales.pop() if scales else head_dim**-0.5


def _unsupported(name: str, feature: str) -> ConfigError:
    return ConfigError(
        f"model: got {name!r} with {feature}, expected a decoder with causal MHA or GQA, over the "
        "whole context or a sliding window (such as llama, qwen3, gemma3)"
    )
