"""Reads KV shapes and weight sizes from a model's configuration, without its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from hisparse.errors import ConfigError, one_line
from hisparse.transformers.model_shape import read_dtype, read_model_shape, text_config
from hisparse.types import KVSpec

#: Types of models whose windows SGLang's own code does not read.
_ATTEND_ALL = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})

#: The end of errors about weights of unknown size.
_EXPECTED_SIZE = "expected the size of the model's files, such as 15GiB"


def read_model_config(model: str) -> Any:
    """Read the transformers configuration of a model.

    Args:
        model: a folder or a hub id.

    Raises:
        ConfigError: transformers cannot read the configuration.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:
        raise ConfigError(
            f"--model: got {model!r}, expected a folder or hub id with a configuration: "
            f"{one_line(error)}"
        ) from None


def shape_per_rank(config: Any, page_size: int, tp: int) -> KVSpec:
    """KV shapes on one of ``tp`` ranks, in the dtype that SGLang chooses by default.

    Args:
        config: the model's configuration.
        page_size: S, tokens per page of a selection.
        tp: tensor parallel size.

    Raises:
        ConfigError: hisparse does not support the model's attention, or ``tp`` does not divide
            its heads.
    """
    text = text_config(config)
    if getattr(text, "kv_lora_rank", None):
        if "linear_attention" in (getattr(text, "layer_types", None) or ()):
            raise ConfigError(
                f"model: got {text.model_type!r} with layers of linear attention, whose states are "
                "not counted, expected attention in every layer"
            )
        spec = _latent_shape(config, text, page_size)
    else:
        spec, _ = read_model_shape(config, page_size)
        # SGLang's Mistral, Mixtral, Phi-3 and Starcoder2 attend all tokens too.
        if not getattr(text, "layer_types", None) or text.model_type in _ATTEND_ALL:
            spec = replace(spec, windows=())
    if spec.num_q_heads % tp or (spec.num_kv_heads % tp and tp % spec.num_kv_heads):
        raise ConfigError(
            f"--tp: got {tp}, expected a divisor of the model's {spec.num_q_heads} query heads "
            f"that divides or is a multiple of its {spec.num_kv_heads} KV heads"
        )
    if spec.dtype == torch.float32:
        # Without --dtype SGLang runs float32 models in float16.
        spec = replace(spec, dtype=torch.float16)
    # With more ranks than KV heads, several ranks hold the same KV head.
    kv_heads = max(1, spec.num_kv_heads // tp)
    return replace(spec, num_q_heads=spec.num_q_heads // tp, num_kv_heads=kv_heads)


def _latent_shape(config: Any, text: Any, page_size: int) -> KVSpec:
    """KV shapes of an MLA model: one latent for all heads; its first columns are the values."""
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


def rotary_frequencies(
    config: Any,
) -> Iterator[tuple[str | None, tuple[torch.Tensor, float]]]:
    """The rotary embeddings that transformers makes of a model's configuration.

    Args:
        config: the model's configuration.

    Yields:
        The type of layers, None for all layers; and their frequencies ``[n]`` in radians per
        position, and the factor of cosines and sines. Kinds that transformers does not know are
        left out.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Transformers writes into it.
    text = copy.deepcopy(text_config(config))
    found = getattr(text, "rope_parameters", None) or {}
    # Layers of different types may rotate differently.
    by_layer = {None: found} if "rope_type" in found else found
    for layer_type, rope in by_layer.items():
        kind = rope.get("rope_type") if isinstance(rope, dict) and "rope_theta" in rope else None
        if kind == "default":
            share = rope.get("partial_rotary_factor") or 1.0
            head_dim = getattr(text, "head_dim", None)
            width = int((head_dim or text.hidden_size // text.num_attention_heads) * share)
            steps = torch.arange(0, width, 2, dtype=torch.float32) / width
            yield layer_type, (1.0 / rope["rope_theta"] ** steps, 1.0)
        elif kind in ROPE_INIT_FUNCTIONS:
            options = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](text, torch.device("cpu"), **options)
            yield layer_type, (frequencies, float(factor))


def count_weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the model's weights in ``dtype``, counted on the meta device.

    Raises:
        ConfigError: the weights are quantized, or transformers does not know the model.
    """
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None):
        raise ConfigError(f"--weights: got nothing for a quantized model, {_EXPECTED_SIZE}")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ConfigError(
            f"--weights: got nothing, and transformers cannot build the model ({one_line(error)}), "
            f"{_EXPECTED_SIZE}"
        ) from None
    elements = sum(int(p.numel()) for p in model.parameters())
    return elements * dtype.itemsize
