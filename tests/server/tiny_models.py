"""Tiny random models of several families, made on the spot.

Their weights are scaled so that attention is peaked and matters, greedy continuations wander
instead of repeating one token, and the best token leads by much more than float32 noise.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

from hisparse_bench.load.contenders import drop_layer_types, scale_weights

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

#: A window that is neither a multiple of a page nor longer than most prompts.
WINDOW = 100

_WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "pad_token_id": 0,
}
_GEMMA = _SHAPE | _WINDOWS | {"tie_word_embeddings": True}

#: Tokens that DeepSeek-V3.2's indexer keeps, and those of others: far less than most prompts.
INDEX_TOP_K = QSA_BUDGET = MSA_BUDGET = 64

#: What differs from ``_SHAPE``; DeepSeek's models have a dense layer and layers of experts.
_SHAPES = {
    "mistral": _SHAPE | {"sliding_window": WINDOW},
    "phi3": _SHAPE | {"sliding_window": WINDOW, "pad_token_id": 0},
    "gemma2": _GEMMA
    | {
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 6.0,
        "final_logit_softcapping": 30.0,
        # SGLang reads this name, and real configurations have both.
        "hidden_act": "gelu_pytorch_tanh",
    },
    # Queries and keys are normalised: this scale makes attention peaked.
    "gemma3": _GEMMA | {"query_pre_attn_scalar": 4},
    "cohere2": _SHAPE | _WINDOWS | {"tie_word_embeddings": True, "logit_scale": 1.0},
    "gpt_oss": _SHAPE
    | _WINDOWS
    | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": _SHAPE | {"pad_token_id": 0},
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

#: Layers of hybrids that attend; the others keep a state.
HYBRID_LAYERS = (1, 3)
_LINEAR = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
_SHAPES |= {
    "exaone4": _SHAPE
    | _WINDOWS
    | {
        # SGLang reads the pattern and no base of the rotation; transformers reads the types.
        "rope_theta": 1000000.0,
        "sliding_window_pattern": "LLG",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4_moe_lite": _SHAPE | _MLA | {"q_lora_rank": 96, "pad_token_id": 0},
    # SGLang reads how an indexer rotates; transformers always interleaves.
    "glm_moe_dsa": _SHAPES["deepseek_v32"]
    | {
        "pad_token_id": 0,
        "indexer_rope_interleave": True,
        "indexer_types": ["full", "shared", "full"],
    },
    "qwen3_next": _SHAPE
    | _EXPERTS
    | _LINEAR
    | {
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 64,
        # SGLang reads the interval, transformers the types.
        "full_attention_interval": 2,
    },
    "kimi_linear": _SHAPE
    | _MLA
    | {
        "num_hidden_layers": 4,
        "rope_parameters": None,
        # SGLang's experts on a CPU leave this factor out.
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "num_experts": 4,
        # transformers saves the weights of a dense layer under the names of a sparse one.
        "first_k_dense_replace": 0,
        "pad_token_id": 0,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": _SHAPE | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "qwen4_exp": _SHAPE
    | _EXPERTS
    | _LINEAR
    | {
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 64,
        "full_attention_interval": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": QSA_BUDGET,
        "indexer_compress_ratio": 4,
    },
}

#: Layers of the tiny MiniMax-M3 without an indexer, and tokens of a block.
MSA_DENSE, MSA_BLOCK = [0], 16
_SHAPES["minimax_m3"] = _SHAPE | {
    "dense_intermediate_size": 256,
    # SGLang reads the width, transformers the factor.
    "rotary_dim": _HEAD_DIM // 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "index_n_heads": KV_HEADS,
    "index_head_dim": 32,
    "index_block_size": MSA_BLOCK,
    "index_topk_blocks": MSA_BUDGET // MSA_BLOCK,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    # SGLang has experts with this activation for GPUs only.
    "mlp_layer_types": ["dense"] * LAYERS,
}
#: What SGLang reads of it, as published; transformers has the same in other fields.
MSA_FIELDS = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "hidden_act": "swigluoai",
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "moe_layer_freq": [0] * LAYERS,
    "sparse_attention_config": {
        "sparse_num_index_heads": KV_HEADS,
        "sparse_index_dim": 32,
        "sparse_block_size": MSA_BLOCK,
        "sparse_topk_blocks": MSA_BUDGET // MSA_BLOCK,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1],
        "sparse_disable_index_value": [0, 1, 1],
    },
}

#: Tokens of a block of the tiny MiniCPM, and those up to which it attends all.
INFLLM_BLOCK, INFLLM_DENSE = 16, 128
#: Without MiniCPM's own scales, which differ from these, it is a Llama that selects.
_SHAPES["minicpm"] = _SHAPE | {
    "scale_emb": 1,
    "scale_depth": LAYERS**0.5,
    "dim_model_base": 128,
    "sparse_config": {
        "kernel_size": 8,
        "kernel_stride": 4,
        "init_blocks": 1,
        "block_size": INFLLM_BLOCK,
        "window_size": INFLLM_BLOCK,
        "topk": INDEX_TOP_K // INFLLM_BLOCK - 1,
        "dense_len": INFLLM_DENSE,
    },
}

#: Kind to its name in transformers.
KINDS = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v32": "DeepseekV32",
    "mistral": "Mistral",
    "phi3": "Phi3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
    "cohere2": "Cohere2",
    "gpt_oss": "GptOss",
    "smollm3": "SmolLM3",
    "exaone4": "Exaone4",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm_moe_dsa": "GlmMoeDsa",
    "qwen3_next": "Qwen3Next",
    "kimi_linear": "KimiLinear",
    "lfm2": "Lfm2",
    "qwen4_exp": "Qwen4ExpText",
    "minimax_m3": "MiniMaxM3VLText",
    "minicpm": "Llama",
}
#: What a configuration names itself, where transformers has no such model.
_NAMES = {
    "minicpm": {"architectures": ["MiniCPMSALAForCausalLM"], "model_type": "minicpm_sala"},
}
#: The same of the class with a head, where it has another name than the configuration.
_HEADS = {"gemma3": "Gemma3", "qwen4_exp": "Qwen4Exp", "minimax_m3": "MiniMaxM3VL"}
#: Names of weights as SGLang reads them, where transformers saves others.
_WEIGHTS = {"minimax_m3": (".indexer.", ".index_")}

#: Counted up when the weights change, so that no old folder is taken.
_VERSION = 5


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hisparse" / "test-models"


def tiny_model(kind: str) -> Path:
    """Folder of a model; ``kind`` is a key of ``KINDS``."""
    folder = _cache() / f"tiny-{kind}-v{_VERSION}"
    if not (folder / "config.json").exists():
        import transformers

        torch.manual_seed(7)
        shape = _SHAPES.get(kind, _SHAPE)
        config = getattr(transformers, f"{KINDS[kind]}Config")(**shape)
        head = _HEADS.get(kind, KINDS[kind])
        model = getattr(transformers, f"{head}ForCausalLM")(config)
        scale_weights(model.float(), bias=0.5)
        with torch.no_grad():
            if config.tie_word_embeddings:
                # A token's own embedding would lead otherwise, which repeats it.
                model.lm_head.weight.mul_(0.02)
            # The end-of-text token never leads.
            model.lm_head.weight[_SHAPE["eos_token_id"]] = 0
        model.save_pretrained(folder)
        if "layer_types" not in _SHAPES.get(kind, {}):
            drop_layer_types(folder / "config.json")
        if kind == "qwen4_exp":
            _wrap_text_config(folder / "config.json")
        if kind in _NAMES:
            config_path = folder / "config.json"
            config_path.write_text(json.dumps(json.loads(config_path.read_text()) | _NAMES[kind]))
        if kind in _WEIGHTS:
            _rename_weights(folder / "model.safetensors", *_WEIGHTS[kind])
    return folder


def _wrap_text_config(path: Path) -> None:
    """Make of a decoder's configuration that of a model for text and images, as published."""
    text = json.loads(path.read_text())
    names = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"}
    # SGLang then builds nothing for images.
    made = names | {"language_model_only": True, "text_config": text}
    path.write_text(json.dumps(made))


def _rename_weights(path: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = {name.replace(old, new): x for name, x in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def with_tokenizer(folder: Path) -> Path:
    """The tiny Llama with a tokenizer of words "w0" to "w511", in a new folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(tiny_model("llama"), folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)
    return folder
