"""Reads what attention looks like from a transformers model or its configuration."""

from __future__ import annotations

from typing import Any

import torch

from hisparse.errors import ConfigError
from hisparse.types import KVSpec

__all__ = ["read_dtype", "read_model_shape", "text_config"]

#: What a configuration has set, and what hisparse does not serve then.
_NOT_SERVED = {
    "is_encoder_decoder": "an encoder and cross attention",
    "kv_lora_rank": "latent attention (MLA)",
    "num_kv_shared_layers": "layers that share K and V",
    "attn_logit_softcapping": "capped logits",
    "attention_chunk_size": "chunked attention",
}

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def text_config(model: Any) -> Any:
    """The configuration of the decoder of ``model``, a model or a configuration of transformers."""
    return getattr(model, "config", model).get_text_config(decoder=True)


def read_dtype(model: Any) -> torch.dtype:
    """The dtype of ``model``, a model or a configuration; float32 when it names none."""
    dtype = getattr(model, "dtype", None) or torch.float32
    # A configuration has the name of its dtype after `save_pretrained`.
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def read_model_shape(model: Any, page_size: int) -> tuple[KVSpec, float]:
    """Shapes of the attention layers, and the softmax scale.

    Args:
        model: model or configuration. A configuration does not name the scale: it is then taken
            for ``head_dim ** -0.5``, and a layer that attends with another one is an error.
        page_size: S of the selection, tokens.

    Raises:
        ConfigError: the model attends in a way that is not built, or its layers differ.
    """
    config = text_config(model)
    name = config.model_type
    for attribute, what in _NOT_SERVED.items():
        if getattr(config, attribute, None):
            raise _not_served(name, f"{what} ({attribute}={getattr(config, attribute)})")
    other = sorted({x for x in getattr(config, "layer_types", None) or () if x != "full_attention"})
    if other:
        raise _not_served(name, f"layers of other kinds ({', '.join(other)})")
    window = getattr(config, "sliding_window", None)
    # Where layers name their kinds, those decide; else a window applies to all of them.
    if window and not getattr(config, "layer_types", None):
        raise _not_served(name, f"a sliding window ({window} tokens)")
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
    )
    return spec, _read_scale(model, name, head_dim)


def _read_size(config: Any, name: str, size: str) -> int:
    value: int | None = getattr(config, size, None)
    if value is None:
        raise _not_served(name, f"no MHA or GQA attention ({size} is not set)")
    return value


def _read_scale(model: Any, name: str, head_dim: int) -> float:
    modules = model.modules() if hasattr(model, "modules") else ()
    scales = {
        float(m.scaling) for m in modules if hasattr(m, "layer_idx") and hasattr(m, "scaling")
    }
    if len(scales) > 1:
        raise _not_served(name, f"layers of {len(scales)} different softmax scales")
    return scales.pop() if scales else head_dim**-0.5


def _not_served(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"model: got {name!r} with {what}, expected a decoder whose layers all attend causally to "
        "the whole context with MHA or GQA (such as llama, qwen2, qwen3)"
    )
