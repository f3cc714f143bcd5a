"""Checks a model's configuration before its weights are loaded."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from hisparse.cache.formats import LATENT_FORMATS
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_indexer, choose_scope
from hisparse.errors import ConfigError

__all__ = ["check_model"]

logger = logging.getLogger("hisparse")

_KV_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def check_model(server_args: Any, config: HiSparseConfig) -> None:
    """Reject models that hisparse cannot serve, or cannot serve with ``config``.

    Args:
        server_args: SGLang's arguments, resolved.
        config: the hisparse configuration.

    Raises:
        ConfigError: names the model's property and what hisparse serves instead.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import AttentionArch

    model = model_config_of(server_args)
    name = ", ".join(model.hf_config.architectures or ["this model"])
    if model.attention_arch not in (AttentionArch.MHA, AttentionArch.MLA):
        raise ConfigError(
            f"{name} has {model.attention_arch.name} attention; expected MHA, GQA or MLA"
        )
    latent = model.attention_arch == AttentionArch.MLA
    choose_scope(config, latent=latent)
    if latent:
        LATENT_FORMATS.get(config.kv_cache_dtype)
    _check_indexer(name, model.hf_config, config)
    if model.is_hybrid_swa:
        raise ConfigError(
            f"{name} keeps the K and V of its windows in a pool of their own; expected one pool: "
            "use --disable-hybrid-swa-memory"
        )
    _check_heads(name, model)
    wanted = _KV_DTYPES.get(str(server_args.kv_cache_dtype).lower())
    if wanted not in (None, model.dtype):
        raise ConfigError(
            f"--kv-cache-dtype is {server_args.kv_cache_dtype} but {name} runs in {model.dtype}; "
            "hisparse stores K and V in the model's dtype or in eight bits: use auto or fp8_e4m3"
        )
    if model.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder-decoder model; expected a decoder")
    if os.environ.get("SGLANG_USE_HND_KVCACHE", "0").lower() in ("1", "true"):
        raise ConfigError("SGLANG_USE_HND_KVCACHE is set; unset it and use host_layout instead")


def _check_heads(name: str, model: Any) -> None:
    """Require attention heads of the same number and width in every layer.

    SGLang knows two kinds of layers: full attention, and with a window.
    """
    from sglang.srt.configs.model_config import AttentionArch

    if model.attention_arch != AttentionArch.MHA:
        return
    full = f"{model.get_num_kv_heads(1)} x {model.head_dim}"
    window = f"{model.get_swa_num_kv_heads(1)} x {model.swa_head_dim}"
    queries = getattr(model.hf_text_config, "num_attention_heads_per_layer", None) or ()
    kinds = {full: "KV", window: "KV"} if full != window else dict.fromkeys(queries, "query")
    if len(kinds) > 1:
        heads = " and ".join(f"{number} {kind} heads" for number, kind in kinds.items())
        raise ConfigError(
            f"{name} has layers with {heads}; expected the same number and width of heads in every "
            "layer"
        )


def _check_indexer(name: str, hf_config: Any, config: HiSparseConfig) -> None:
    """Require an indexer in the model exactly when the algorithm uses one."""
    from sglang.srt.configs.model_config import (
        get_dsa_index_kpool,
        get_dsa_index_topk,
        is_deepseek_dsa,
    )

    has_indexer = is_deepseek_dsa(hf_config)
    check_indexer(name, config, has_indexer=has_indexer)
    if not has_indexer:
        return
    pooled = get_dsa_index_kpool(hf_config)
    if pooled > 1:
        raise ConfigError(
            f"the indexer of {name} pools {pooled} tokens into one key; expected one key per token"
        )
    trained = (get_dsa_index_topk(hf_config), 0, 0)
    got = (config.budget, config.num_sink_pages, config.num_recent_pages)
    if got != trained:
        logger.warning(
            "hisparse: budget, num_sink_pages and num_recent_pages are %s; %s was trained with %s",
            got,
            name,
            trained,
        )
