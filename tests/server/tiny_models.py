"""Tiny random Llama, Qwen2 and DeepSeek-V2 models, made on the spot.

Their weights are scaled so that attention is peaked and matters, greedy continuations wander
instead of repeating one token, and the best token leads by much more than float32 noise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

__all__ = [
    "CONTEXT",
    "KV_HEADS",
    "LAYERS",
    "TOKEN_BYTES",
    "VOCAB",
    "deepseek_v2_config",
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

#: Counted up when the weights change, so that no old folder is taken.
_VERSION = 3


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hisparse" / "test-models"


def tiny_model(kind: str) -> Path:
    """Folder of a model; ``kind`` is "llama" or "qwen2"."""
    folder = _cache() / f"tiny-{kind}-v{_VERSION}"
    if not (folder / "config.json").exists():
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(7)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**_SHAPE))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE))
        _scale(model.float())
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def _scale(model: torch.nn.Module) -> None:
    """Unit-variance activations, attention logits of a standard deviation of about 3."""
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_(0, 0.5)
        elif weight.ndim == 2 and "embed" in name:
            weight.normal_(0, 1)
        elif weight.ndim == 2:
            gain = 2.0 if "q_proj" in name or "o_proj" in name else 1.5
            weight.normal_(0, gain / weight.shape[1] ** 0.5)
    # The end-of-text token never leads.
    model.lm_head.weight[_SHAPE["eos_token_id"]] = 0


def deepseek_v2_config(folder: Path) -> Path:
    """A folder with the configuration of a small MLA model and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _SHAPE | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "aux_loss_alpha": 0.0,
    }
    config.pop("head_dim")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
