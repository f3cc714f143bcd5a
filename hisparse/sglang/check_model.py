"""Whether hisparse can serve a model, by its configuration alone."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from hisparse.algorithms import ALGORITHMS
from hisparse.assemble import choose_scope
from hisparse.config import HiSparseConfig
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
    """Refuse models that hisparse does not serve, or not with this configuration.

    Raises:
        ConfigError: says what the model has and what hisparse serves.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import AttentionArch

    model = model_config_of(server_args)
    name = ", ".join(model.hf_config.architectures or ["this model"])
    if model.attention_arch not in (AttentionArch.MHA, AttentionArch.MLA):
        raise ConfigError(
            f"{name} has {model.attention_arch.name} attention; hisparse serves MHA, GQA and MLA "
            "models"
        )
    choose_scope(config, latent=model.attention_arch == AttentionArch.MLA)
    _check_indexer(name, model.hf_config, config)
    window = getattr(model.hf_text_config, "use_sliding_window", True) and model.sliding_window_size
    if model.is_hybrid_swa or (window and window > 0):
        raise ConfigError(
            f"{name} has sliding-window attention; hisparse serves models with full attention in "
            "every layer"
        )
    wanted = _KV_DTYPES.get(str(server_args.kv_cache_dtype).lower())
    if wanted not in (None, model.dtype):
        raise ConfigError(
            f"--kv-cache-dtype is {server_args.kv_cache_dtype} but {name} runs in {model.dtype}; "
            "hisparse stores K and V as the model computes them: use auto"
        )
    if model.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder-decoder model; hisparse serves decoders")
    if os.environ.get("SGLANG_USE_HND_KVCACHE", "0").lower() in ("1", "true"):
        raise ConfigError("SGLANG_USE_HND_KVCACHE is set; unset it: use host_layout instead")


def _check_indexer(name: str, hf_config: Any, config: HiSparseConfig) -> None:
    """A model with an indexer is served by an algorithm that asks it, and no other model is."""
    from sglang.srt.configs.model_config import (
        get_dsa_index_kpool,
        get_dsa_index_topk,
        is_deepseek_dsa,
    )

    asks = ALGORITHMS.get(config.algorithm).indexer
    if not is_deepseek_dsa(hf_config):
        if asks:
            raise ConfigError(
                f"algorithm {config.algorithm!r} asks the model's indexer, which {name} does not "
                "have; expected a model such as DeepSeek-V3.2, or another algorithm"
            )
        return
    if not asks:
        others = ", ".join(n for n in ALGORITHMS if ALGORITHMS.get(n).indexer)
        raise ConfigError(
            f"{name} was trained to attend what its indexer selects, and algorithm "
            f"{config.algorithm!r} does not ask it; expected one that does: {others}"
        )
    if get_dsa_index_kpool(hf_config) > 1:
        raise ConfigError(
            f"the indexer of {name} pools {get_dsa_index_kpool(hf_config)} tokens to a key; "
            "hisparse serves one key per token"
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
