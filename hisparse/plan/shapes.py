"""What a model's configuration says of the shapes of its attention on a rank of a server."""

import copy
from dataclasses import replace
from typing import Any

import torch

from hisparse.errors import ConfigError
from hisparse.model_config import check_own_selection, read_dtype, read_model_shape, text_config
from hisparse.sglang.features import trained_indexer
from hisparse.types import KVSpec

#: Types of models whose windows SGLang's code does not read.
_ATTEND_ALL = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
_LINEAR = "linear_attention"


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
    kind, trained = trained_indexer(text)
    served = kind.fields if kind else frozenset[str]()
    check_own_selection(text.model_type, text, served=served)
    attending = _attending(text, selects=trained is not None)
    if getattr(text, "kv_lora_rank", None):
        spec = _latent_shape(config, attending, page_size)
    else:
        spec, _ = read_model_shape(attending, page_size, served=served)
        spec = replace(spec, dtype=read_dtype(config))
        # SGLang's Mistral, Mixtral, Phi-3 and Starcoder2 attend all tokens too.
        if not getattr(text, "layer_types", None) or text.model_type in _ATTEND_ALL:
            spec = replace(spec, windows=())
    if trained:
        spec = replace(spec, index_head_dim=trained.head_dim, unindexed=trained.unindexed)
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


def state_bytes(config: Any, tp: int) -> int:
    """Device memory of one state of a hybrid's layers of linear attention, on one of ``tp`` ranks.

    A state of a layer is the last inputs of a convolution, in bfloat16, and a matrix for each
    value head, in ``mamba_ssm_dtype``, by default float32.

    Args:
        config: the model's configuration.
        tp: tensor parallel size.

    Returns:
        bytes in all layers; 0: the model is no such hybrid.
    """
    text = text_config(config)
    layers: int = (getattr(text, "layer_types", None) or []).count(_LINEAR)
    if not layers:
        return 0
    keys: int = text.linear_num_key_heads * text.linear_key_head_dim
    values: int = text.linear_num_value_heads * text.linear_value_head_dim
    width: int = text.linear_key_head_dim
    taps: int = text.linear_conv_kernel_dim - 1
    dtype: torch.dtype = getattr(torch, getattr(text, "mamba_ssm_dtype", None) or "float32")
    inputs = (2 * keys + values) * taps * torch.bfloat16.itemsize
    return layers * (inputs + values * width * dtype.itemsize) // tp


def _attending(text: Any, *, selects: bool) -> Any:
    """The configuration of a decoder with only those of its layers that attend.

    Args:
        text: the configuration.
        selects: whether an indexer selects for the layers, which then have kinds of its own.

    Raises:
        ConfigError: the configuration does not say how large the states of other layers are.
    """
    kinds = getattr(text, "layer_types", None) or []
    if not selects and _LINEAR not in kinds:
        return text
    if _LINEAR in kinds and not hasattr(text, "linear_num_key_heads"):
        raise ConfigError(
            f"model: got {text.model_type!r} with layers of linear attention, whose states are "
            "not counted, expected attention in every layer"
        )
    only = copy.copy(text)
    only.num_hidden_layers = text.num_hidden_layers - kinds.count(_LINEAR)
    only.layer_types = ["full_attention"] * only.num_hidden_layers
    return only


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
        attention="MLA",
    )
