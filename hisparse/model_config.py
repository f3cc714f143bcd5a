"""What a model of transformers, or its configuration, says of shapes and rotary embeddings.

Transformers itself is imported by the functions that need it.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from hisparse.errors import ConfigError, one_line
from hisparse.types import KVSpec

#: Attribute of a configuration: attend as latent attention (``hisparse.transformers.latents``).
AS_LATENTS = "hisparse_as_latents"

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

#: Fields with which a configuration says that the model was trained to select what it attends.
_SELECTING = re.compile(
    r"(^|_)index(er)?_.*(topk|head|budget|block|pool|types|tokens)|^cli_factor$"
    r"|sparse_(attention|attn|config|topk)|block_?sparse|compress_(ratio|rate)s?$|^(moba|nsa)_|^dual_chunk"
)
#: Those of an indexer such as that of DeepSeek-V3.2, with a key for each token.
LIGHTNING_INDEXER = frozenset(
    {
        *("index_topk", "index_n_heads", "index_head_dim", "indexer_types"),
        *("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"),
    }
)
#: Values of a model without it: off, one token per key, an indexer in every layer ("F", "full").
_OFF = (None, 0, 1, "F", "full")

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def text_config(model: Any) -> Any:
    """The configuration of a model's decoder.

    Args:
        model: a transformers model or its configuration.
    """
    return getattr(model, "config", model).get_text_config(decoder=True)


def check_own_selection(name: str, *configs: Any, served: frozenset[str] = frozenset()) -> None:
    """Refuse a model whose configuration says that it selects by itself what it attends.

    Args:
        name: of the model, for the message.
        configs: of the model and of its decoder.
        served: fields of an indexer that the caller serves.

    Raises:
        ConfigError: names the fields that say so, such as "indexer_budget".
    """
    fields = {field: x for config in configs for field, x in vars(config).items()}
    found = {field for field, x in fields.items() if _SELECTING.search(field) and not _is_off(x)}
    if found := found - served:
        raise ConfigError(
            f"{name} was trained to select by itself what it attends ({', '.join(sorted(found))}); "
            "expected attention over all tokens or a window, or in a server an indexer that an "
            "algorithm asks (hisparse algorithms)"
        )


def _is_off(value: Any) -> bool:
    if isinstance(value, bool | dict):
        return not value
    values = value if isinstance(value, list | tuple | str) else (value,)
    return all(each in _OFF for each in values)


def read_dtype(model: Any) -> torch.dtype:
    """The dtype of a transformers model or of its configuration; float32 if it names none."""
    dtype = getattr(model, "dtype", None) or torch.float32
    # `save_pretrained` replaces a configuration's dtype by its name.
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def read_model_shape(
    model: Any,
    page_size: int,
    context_length: int | None = None,
    *,
    served: frozenset[str] = frozenset(),
) -> tuple[KVSpec, float]:
    """Read the shape of the attention layers, and the softmax scale.

    Args:
        model: a transformers model or its configuration. A configuration does not name the scale:
            the function assumes ``head_dim ** -0.5``, and layers with another scale raise an error
            when they run.
        page_size: S, tokens per page of a selection.
        context_length: tokens, the longest sequence; a window that holds it is none. None: unknown.
        served: fields of an indexer that the caller serves.

    Raises:
        ConfigError: hisparse does not support the model's attention, or its layers differ.
    """
    config = text_config(model)
    name = config.model_type
    for attribute, feature in _UNSUPPORTED.items():
        if getattr(config, attribute, None):
            raise _unsupported(name, f"{feature} ({attribute}={getattr(config, attribute)})")
    check_own_selection(name, config, served=served)
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
    if getattr(config, AS_LATENTS, False):
        values, keys = spec.num_kv_heads * spec.v_head_dim, spec.num_kv_heads * spec.head_dim
        spec = replace(
            spec, attention="MLA", num_kv_heads=1, head_dim=values + keys, v_head_dim=values
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
        try:
            return AutoConfig.from_pretrained(model)
        except ValueError as error:
            if "does not recognize" not in str(error):
                raise
            # SGLang registers configurations of its own, such as MiniCPM's.
            import_module("sglang.srt.utils.hf_transformers.common")
            return AutoConfig.from_pretrained(model)
    except Exception as error:
        raise ConfigError(
            f"--model: got {model!r}, expected a folder or hub id with a configuration: "
            f"{one_line(error)}"
        ) from None


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
    ropes = getattr(text, "rope_parameters", None) or {}
    # Layers of different types may rotate differently.
    by_layer = {None: ropes} if "rope_type" in ropes else ropes
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
