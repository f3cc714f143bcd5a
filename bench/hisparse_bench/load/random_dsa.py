"""A small random model with DeepSeek-V3.2's sparse attention, for machines without a real one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hisparse.eval import models

#: Its name on the command line.
NAME = "random-dsa"
_CONTEXT = 16384
_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": _CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "kv_lora_rank": 256,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk": 256,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": _CONTEXT // 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def make(say: Callable[[str], None]) -> str:
    """Make the model once, with the tokenizer of SmolLM2; return its folder."""
    target = models.default_cache() / "models" / f"{NAME}-v1"
    if not (target / "config.json").is_file():
        import transformers

        tokenizer = models.load(
            transformers.AutoTokenizer, models.resolve("smollm2-135m", progress=say)
        )
        say(f"{NAME}: making random weights")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            config = transformers.DeepseekV32Config(**_SHAPE, vocab_size=len(tokenizer))
            model = transformers.DeepseekV32ForCausalLM(config).float()
            scale_weights(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as temporary:
            made = Path(temporary) / "made"
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            drop_layer_types(made / "config.json")
            made.rename(target)
    return str(target)


@torch.no_grad()
def scale_weights(model: torch.nn.Module, *, bias: float | None = None) -> None:
    """Scale weights so that attention is peaked and continuations wander.

    Args:
        model: random weights, which are replaced: activations have unit variance, attention logits
            a standard deviation of about 3.
        bias: standard deviation of biases; None leaves them as they are.
    """
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            if bias is not None:
                weight.normal_(0, bias)
        elif weight.ndim == 2 and "embed" in name:
            weight.normal_(0, 1)
        elif weight.ndim >= 2:
            gain = 2.0 if any(x in name for x in ("q_proj", "q_b_proj", "o_proj")) else 1.5
            weight.normal_(0, gain / weight.shape[-1] ** 0.5)
        if "indexer.weights_proj" in name:
            # SGLang keeps these in bfloat16, whatever the dtype of the model.
            weight.copy_(weight.bfloat16())


def drop_layer_types(path: Path) -> None:
    """Leave out what DeepSeek's own files leave out and releases of transformers call otherwise."""
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2))
