"""Tiny random Llama, Qwen2, DeepSeek-V2 and DeepSeek-V3.2 models, made on the spot.

Their weights are scaled so that attention is peaked and matters, greedy continuations wander
instead of repeating one token, and the best token leads by much more than float32 noise.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hisparse_bench.load.random_dsa import drop_layer_types, scale_weights

__all__ = [
    "CONTEXT",
    "INDEX_TOP_K",
    "KINDS",
    "KV_HEADS",
    "LAYERS",
    "TOKEN_BYTES",
    "VOCAB",
    "tiny_model",
]

CONTEXT = 8192
VOCAB = 512
LAYERS = 3
KV_HEADS = 2
_HEAD_DIM = 32

#: K and V of one token in float32, all layers.
TOKEN_BYTES = LAYERS * KV_HEADS * 2 * _HEAD_DIM * 4

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT // 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}

#: Tokens that DeepSeek-V3.2's indexer keeps: far less than most prompts.
INDEX_TOP_K = 64

#: What differs from ``_SHAPE``; in both a dense layer and layers of experts.
_SHAPES = {
    "deepseek_v2": _SHAPE
    | _MLA
    | {"q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax"},
    "deepseek_v32": _SHAPE
    | _MLA
    | {
        "q_lora_rank": 96,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "index_topk": INDEX_TOP_K,
        "index_n_heads": 16,
        "index_head_dim": 128,
    },
}

#: Kind to its name in transformers.
KINDS = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v32": "DeepseekV32",
}

#: Counted up when the weights change, so that no old folder is taken.
_VERSION = 4


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hisparse" / "test-models"


def tiny_model(kind: str) -> Path:
    """Folder of a model; ``kind`` is "llama", "qwen2", "deepseek_v2" or "deepseek_v32"."""
    folder = _cache() / f"tiny-{kind}-v{_VERSION}"
    if not (folder / "config.json").exists():
        import transformers

        torch.manual_seed(7)
        shape = _SHAPES.get(kind, _SHAPE)
        config = getattr(transformers, f"{KINDS[kind]}Config")(**shape)
        model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config)
        scale_weights(model.float(), bias=0.5)
        with torch.no_grad():
            # The end-of-text token never leads.
            model.lm_head.weight[_SHAPE["eos_token_id"]] = 0
        model.save_pretrained(folder)
        drop_layer_types(folder / "config.json")
    return folder
