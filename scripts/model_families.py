"""Model families of SGLang's registry, each as a tiny model: a new family is one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 512

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_MHA: dict[str, Any] = {"num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MLA: dict[str, Any] = _MHA | {
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip
_INDEXER = {"index_topk": 64, "index_n_heads": 16, "index_head_dim": 128}
_DSA = {"algorithm": "dsa", "page_size": 1}
_LINEAR = {
    "num_experts": 4, "shared_expert_intermediate_size": 64, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_QSA = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 384,
    "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2], "mrope_interleaved": True,
    },
}  # fmt: skip
_M3 = {
    "dense_intermediate_size": 256, "rotary_dim": 16, "mlp_layer_types": ["dense"] * 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 32, "index_topk_blocks": 12,
}  # fmt: skip
#: The same as SGLang reads it, which transformers does not keep.
_M3_FIELDS = json.dumps({
    "hidden_act": "swigluoai", "qk_norm_type": "per_head", "use_gemma_norm": True,
    "moe_layer_freq": [0, 0, 0],
    "sparse_attention_config": {
        "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 32,
        "sparse_topk_blocks": 12, "sparse_init_block": 0, "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1],
    },
})  # fmt: skip
_TRAINED = {"num_sink_pages": 0, "num_recent_pages": 0}
_WINDOW = {"sliding_window": 128}
_KIMI = {
    "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "q_lora_rank": None,
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "head_dim": 32, "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip
#: SGLang's radix cache keeps no states of layers on a CPU, with pages of more than one token.
_STATES = ("--disable-radix-cache",)
_MAMBA: dict[str, Any] = {"state_size": 16, "mamba_d_state": 16, "mamba_n_heads": 4}


@dataclass(frozen=True)
class Family:
    """A tiny model with random weights.

    Attributes:
        name: as its users call it.
        config: class of the configuration in transformers.
        overrides: what differs from the shape that all share.
        architecture: of SGLang's registry; "": that of ``config``.
        flags: more flags of SGLang's.
        hisparse: more keys of ``--hisparse-config``.
        comparable: whether ``torch_native`` computes the model's attention. It ignores caps of
            logits.
        forked: False: SGLang imports the model only after the stand-ins, in a process of its own.
    """

    name: str
    config: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = ""
    flags: tuple[str, ...] = ()
    hisparse: Mapping[str, Any] = field(default_factory=dict)
    comparable: bool = True
    forked: bool = True

    @property
    def model_class(self) -> str:
        """Name of the model's class in SGLang, or in transformers for the fallback."""
        return self.architecture or self.config.removesuffix("Config") + "ForCausalLM"

    def write(self, folder: Path) -> Path:
        """Write ``config.json`` into ``folder``; return the folder."""
        import transformers

        config = getattr(transformers, self.config)(**_SHAPE | dict(self.overrides))
        config.architectures = [self.model_class]
        config.save_pretrained(folder)
        return folder


def _fallback(name: str, config: str, overrides: Mapping[str, Any] | None = None) -> Family:
    """A family that SGLang runs with transformers' code."""
    return Family(name, config, overrides or {}, flags=("--model-impl", "transformers"))


FAMILIES: tuple[Family, ...] = (
    Family("Llama", "LlamaConfig"),
    Family("Mistral", "MistralConfig", {"sliding_window": None}),
    Family("Mistral with a window", "MistralConfig", _WINDOW),
    Family("Ministral 3", "Ministral3Config"),
    Family("Mixtral", "MixtralConfig", {"num_local_experts": 4}),
    Family("Qwen2", "Qwen2Config"),
    Family("Qwen2 MoE", "Qwen2MoeConfig", _EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 64}),
    Family("Qwen3", "Qwen3Config"),
    Family("Qwen3 MoE", "Qwen3MoeConfig", _EXPERTS | {"num_experts": 4}),
    Family("Gemma", "GemmaConfig"),
    Family("Gemma 2", "Gemma2Config", _WINDOW | {
        "query_pre_attn_scalar": 32, "hidden_act": "gelu_pytorch_tanh"},
        comparable=False),
    Family("Gemma 3", "Gemma3TextConfig", _WINDOW | {"query_pre_attn_scalar": 32},
           "Gemma3ForCausalLM"),
    Family("Gemma 4", "Gemma4TextConfig", _WINDOW | {"global_head_dim": 64}, "Gemma4ForCausalLM"),
    Family("Phi-2", "PhiConfig", _MHA),
    Family("Phi-3", "Phi3Config", {"sliding_window": None}),
    Family("Phi-3 with a window", "Phi3Config", _WINDOW),
    Family("Phi-3.5 MoE", "PhimoeConfig", {"num_local_experts": 4}, "PhiMoEForCausalLM"),
    Family("GPT-2", "GPT2Config", _MHA, "GPT2LMHeadModel"),
    Family("GPTBigCode", "GPTBigCodeConfig", {"num_key_value_heads": 1}),
    Family("GPT-J", "GPTJConfig", _MHA | {"rotary_dim": 16}),
    Family("gpt-oss", "GptOssConfig", _WINDOW | {"num_local_experts": 4}),
    Family("OPT", "OPTConfig", _MHA | {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    Family("Persimmon", "PersimmonConfig", _MHA),
    Family("OLMo", "OlmoConfig", _MHA),
    Family("OLMo 2", "Olmo2Config"),
    Family("OLMo 3", "Olmo3Config", _WINDOW, "Olmo2ForCausalLM"),
    Family("OLMoE", "OlmoeConfig", _MHA | {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("StableLM", "StableLmConfig"),
    Family("StarCoder2", "Starcoder2Config", {"sliding_window": None}),
    Family("StarCoder2 with a window", "Starcoder2Config", _WINDOW),
    Family("Command R", "CohereConfig"),
    Family("Command R7B", "Cohere2Config", _WINDOW),
    Family("DeepSeek-V2", "DeepseekV2Config", _MLA | _ROUTED | {
        "q_lora_rank": None, "scoring_func": "softmax", "topk_method": "greedy"}),
    Family("DeepSeek-V3", "DeepseekV3Config", _MLA | _ROUTED),
    Family("DeepSeek-V3.2", "DeepseekV32Config", _MLA | _ROUTED | _INDEXER, hisparse=_DSA),
    Family("Granite", "GraniteConfig"),
    Family("Granite MoE", "GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Granite 4 hybrid", "GraniteMoeHybridConfig", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention", "mamba"]}, flags=_STATES),
    Family("GLM-4", "Glm4Config"),
    Family("GLM-4.5", "Glm4MoeConfig", _ROUTED),
    Family("GLM-4.7 Flash", "Glm4MoeLiteConfig", _MLA | _ROUTED),
    Family("GLM-5", "GlmMoeDsaConfig", _MLA | _ROUTED | _INDEXER, hisparse=_DSA),
    Family("EXAONE 4", "Exaone4Config", _WINDOW | {
        "sliding_window_pattern": "LLG",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    Family("ERNIE 4.5", "Ernie4_5Config", architecture="Ernie4_5_ForCausalLM"),
    Family("ERNIE 4.5 MoE", "Ernie4_5_MoeConfig", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1}),
    Family("Hunyuan", "HunYuanDenseV1Config"),
    Family("MiniMax M2", "MiniMaxM2Config", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid",
        "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 16}),
    Family("MiniMax-M3", "MiniMaxM3VLTextConfig", _M3, "MiniMaxM3SparseForCausalLM",
        flags=("--json-model-override-args", _M3_FIELDS), comparable=False,
        hisparse=_TRAINED | {"algorithm": "msa", "page_size": 32, "dense_layers": [0]}),
    Family("Arcee", "ArceeConfig"),
    Family("AFMoE", "AfmoeConfig", _WINDOW | _EXPERTS | {"num_experts": 4}),
    Family("Apertus", "ApertusConfig"),
    Family("Solar", "LlamaConfig", {
        "bskcn_1": [0], "bskcn_2": [1], "bskcn_3": [1], "bskcn_4": [2], "bskcn_tv": [0.9, 0.8]},
        "SolarForCausalLM"),
    Family("Llama 4", "Llama4TextConfig", {
        "num_local_experts": 2, "attention_chunk_size": 128, "intermediate_size_mlp": 128},
        "Llama4ForCausalLM"),
    Family("InternLM3", "LlamaConfig", architecture="InternLM3ForCausalLM"),
    Family("Qwen3-Next", "Qwen3NextConfig", _EXPERTS | _LINEAR, flags=_STATES),
    Family("Qwen4-Exp", "Qwen4ExpConfig", {
        "language_model_only": True, "text_config": _SHAPE | _EXPERTS | _LINEAR | _QSA},
        "Qwen4ExpForConditionalGeneration", flags=_STATES,
        hisparse=_TRAINED | {"algorithm": "qsa", "page_size": 4}, comparable=False,
        forked=False),
    Family("Kimi Linear", "KimiLinearConfig", _MLA | _KIMI, flags=_STATES),
    Family("LFM2", "Lfm2Config", {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}, flags=_STATES),
    Family("Falcon H1", "FalconH1Config", _MAMBA, flags=_STATES),
    Family("Mamba", "MambaConfig"),
    _fallback("GPT-NeoX", "GPTNeoXConfig", _MHA),
    _fallback("SmolLM3", "SmolLM3Config"),
    _fallback("Seed-OSS", "SeedOssConfig"),
    _fallback("ERNIE 4.5, fallback", "Ernie4_5Config"),
    _fallback("Helium", "HeliumConfig"),
    _fallback("Nemotron", "NemotronConfig"),
    _fallback("dots1", "Dots1Config", _ROUTED | _WINDOW),
    _fallback("Llama, fallback", "LlamaConfig"),
)  # fmt: skip
