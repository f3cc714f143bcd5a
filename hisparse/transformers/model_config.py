"""What a server would make of a model, from its configuration alone; no weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hisparse.errors import ConfigError, one_line
from hisparse.transformers.model_shape import read_dtype, read_model_shape, text_config
from hisparse.types import KVSpec

__all__ = ["count_weight_bytes", "read_model_config", "shape_per_rank"]


def read_model_config(model: str) -> Any:
    """The configuration of a folder or hub id.

    Raises:
        ConfigError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:
        raise ConfigError(
            f"--model: cannot read the configuration of {model!r}: {one_line(error)}"
        ) from None


def shape_per_rank(config: Any, page_size: int, tp: int) -> KVSpec:
    """Shapes on one of ``tp`` ranks, with K and V in the dtype that SGLang chooses.

    Args:
        config: the model's configuration.
        page_size: S of the selection, tokens.
        tp: ranks that share the heads.

    Raises:
        ConfigError: the model attends in a way that is not built, or ``tp`` does not divide it.
    """
    text = text_config(config)
    if getattr(text, "kv_lora_rank", None):
        spec = _latent_shape(config, text, page_size)
    else:
        spec, _ = read_model_shape(config, page_size)
    if spec.num_q_heads % tp or (spec.num_kv_heads % tp and tp % spec.num_kv_heads):
        raise ConfigError(
            f"--tp: got {tp}, expected a number that divides the model's {spec.num_q_heads} query "
            f"heads and goes with its {spec.num_kv_heads} KV heads"
        )
    if spec.dtype == torch.float32:
        # What SGLang makes of float32 when no --dtype is given.
        spec = replace(spec, dtype=torch.float16)
    # With more ranks than KV heads, each head is on several ranks.
    kv_heads = max(1, spec.num_kv_heads // tp)
    return replace(spec, num_q_heads=spec.num_q_heads // tp, num_kv_heads=kv_heads)


def _latent_shape(config: Any, text: Any, page_size: int) -> KVSpec:
    """MLA: one latent for all heads, whose first columns are the values."""
    rank: int = text.kv_lora_rank
    return KVSpec(
        num_layers=text.num_hidden_layers,
        num_q_heads=text.num_attention_heads,
        num_kv_heads=1,
        head_dim=rank + text.qk_rope_head_dim,
        v_head_dim=rank,
        dtype=read_dtype(config),
        page_size=page_size,
        latent=True,
        index_head_dim=(getattr(text, "index_topk", None) and text.index_head_dim) or 0,
    )


def count_weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights in ``dtype``, from a model without storage.

    Raises:
        ConfigError: they are quantised, or transformers does not know the model.
    """
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None):
        raise ConfigError(
            "--weights: got nothing, but this model is quantised; expected the size of its files, "
            "such as 15GiB"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ConfigError(
            f"--weights: got nothing, and transformers cannot tell ({one_line(error)}); expected "
            "the size of the model's files, such as 15GiB"
        ) from None
    elements = sum(int(p.numel()) for p in model.parameters())
    return elements * dtype.itemsize
