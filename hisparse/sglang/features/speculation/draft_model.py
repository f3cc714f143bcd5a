"""A draft model beside the target: the memory of its pool, and its attention backends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from hisparse.cache.formats import format_of
from hisparse.errors import ConfigError
from hisparse.sglang import features
from hisparse.sglang.install import DRAFT_BACKEND
from hisparse.sglang.models import hybrid_layers, name_of, use_absorbed_mla
from hisparse.types import KVSpec


def draft_token_bytes(configurator: Any) -> int:
    """Device memory of one token in the draft model's own pool, all its layers; 0: no such model.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.

    Raises:
        ConfigError: the draft model is a hybrid.
    """
    draft = configurator.spec_aux_config
    model = draft.draft_model_config
    if model is None:
        return 0
    from sglang.srt.configs.model_config import AttentionArch

    if hybrid_layers(model) is not None:
        raise ConfigError(
            f"the draft model is a hybrid ({name_of(model)}); expected one with attention in "
            "every layer"
        )
    if model.attention_arch == AttentionArch.MLA:
        width = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        width = model.get_num_kv_heads(1) * (model.head_dim + model.v_head_dim)
    token_bytes: int = draft.draft_kv_num_layers * width * model.dtype.itemsize
    return token_bytes


def sglang_draft_bytes(configurator: Any, target: KVSpec) -> int:
    """What SGLang adds to the bytes of a token for a draft model, whose layers it takes as equal.

    Args:
        configurator: SGLang's ``KVCacheConfigurator`` of the target.
        target: shapes of the target.
    """
    layers = configurator.spec_aux_config.eagle_draft_num_layers or 0
    plain = replace(target, dtype=configurator.kv_cache_dtype, kv_cache_dtype="auto")
    return int(format_of(plain).token_bytes * int(layers) / target.num_layers)


def make_draft_backend(model_runner: Any) -> Any:
    """The attention backend of SGLang's draft model."""
    from hisparse.sglang.features.speculation.draft_backend import DraftAttnBackend

    use_absorbed_mla(DRAFT_BACKEND)
    for feature in features.enabled():
        feature.prepare_draft(model_runner.model)
    return DraftAttnBackend(model_runner)


def around_create_decode_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Attend with :class:`DraftSteps` in the forwards that draft."""
    if factory.draft_attn_backend != DRAFT_BACKEND:
        return original(factory)
    from hisparse.sglang.features.speculation.draft_backend import DraftSteps

    # The first drafted token comes from the forward before.
    steps = factory.speculative_num_steps - 1
    return DraftSteps(factory.draft_model_runner, steps) if steps else None


def around_create_draft_extend_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Attend with :class:`DraftAttnBackend` in forwards over prompts and verified tokens."""
    if factory.draft_attn_backend != DRAFT_BACKEND:
        return original(factory)
    from hisparse.sglang.features.speculation.draft_backend import DraftAttnBackend

    return DraftAttnBackend(factory.draft_model_runner)


def around_init_lm_head(original: Callable[[Any], None], worker: Any) -> None:
    """Share the target's embeddings with the draft model, also on a machine without CUDA.

    Some of SGLang's models synchronize the GPU after they have released their own.
    """
    if torch.cuda.is_available():
        return original(worker)
    with patch.object(torch.cuda, "synchronize", lambda *_: None):
        return original(worker)
