"""Which configurations say that a model selects by itself what it attends."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from sglang.srt.configs.model_config import dsa_layer_skips_topk
from transformers import (
    DeepseekV4Config,
    DeepseekV32Config,
    Glm5NextTextConfig,
    GlmMoeDsaConfig,
    HYV4Config,
    LlamaConfig,
    MiniMaxM3VLTextConfig,
    PretrainedConfig,
    Qwen4ExpTextConfig,
)

from hisparse.errors import ConfigError
from hisparse.model_config import (
    LIGHTNING_INDEXER,
    check_own_selection,
    read_model_shape,
    text_config,
)
from hisparse.plan.shapes import shape_per_rank
from hisparse.sglang.features import trained_indexer
from scripts.model_families import _SHAPE, FAMILIES

QSA = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
    "indexer_compress_ratio": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                    "partial_rotary_factor": 0.25},
}  # fmt: skip
M3 = {"sparse_topk_blocks": 16, "sparse_attention_freq": [0, 1, 1]}
PUBLISHED = M3 | {"sparse_block_size": 128, "sparse_index_dim": 128, "sparse_local_block": 1}
#: Configurations, and the fields that say it.
SELECTING: list[tuple[Any, str]] = [
    (
        Qwen4ExpTextConfig(**QSA),
        "indexer_budget, indexer_compress_ratio, indexer_head_dim, indexer_n_heads",
    ),
    (
        MiniMaxM3VLTextConfig(num_hidden_layers=3, sparse_attention_config=M3),
        "index_block_size, index_head_dim, index_n_heads, index_topk_blocks",
    ),
    (DeepseekV4Config(), "compress_rates, index_head_dim, index_n_heads, index_topk"),
    (GlmMoeDsaConfig(), "index_head_dim, index_n_heads, index_topk"),
    (HYV4Config(), "index_head_dim, index_n_heads, index_topk, indexer_types"),
    # Without a class in transformers: MiniCPM (InfLLM-V2), Qwen2.5-1M, MoBA.
    (LlamaConfig(sparse_config={"topk": 64}), "sparse_config"),
    (LlamaConfig(dual_chunk_attention_config={"chunk": 8192}), "dual_chunk_attention_config"),
    (LlamaConfig(moba_topk=8, use_sparse_attention=True), "moba_topk, use_sparse_attention"),
]
#: Indexers that differ from that of DeepSeek-V3.2, and the fields that say it.
OTHER_INDEXERS: list[tuple[Any, str]] = [
    (Glm5NextTextConfig(), "index_kpool, index_kpool_always_select_tail"),
    (GlmMoeDsaConfig(index_local_tokens=64), "index_local_tokens"),
]


def name_of(config: Any) -> str:
    return getattr(config, "model_type", "")


def fields_of(*configs: Any, served: frozenset[str] = frozenset()) -> str:
    """What the line of the refusal names; "": none."""
    try:
        check_own_selection("it", *configs, served=served)
    except ConfigError as error:
        said = str(error).removeprefix("it was trained to select by itself what it attends (")
        return said.partition("); expected attention over all tokens or a window")[0]
    return ""


@pytest.mark.parametrize(("config", "fields"), SELECTING, ids=name_of)
def test_a_model_that_selects_by_itself(config: Any, fields: str) -> None:
    assert fields_of(config) == fields


@pytest.mark.parametrize(("config", "fields"), OTHER_INDEXERS, ids=name_of)
def test_an_indexer_of_another_kind(config: Any, fields: str) -> None:
    assert fields_of(config, served=LIGHTNING_INDEXER) == fields
    with pytest.raises(ConfigError, match=f"^{config.model_type} was trained to select by itself"):
        shape_per_rank(config, 1, 1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_do_not(family: Any) -> None:
    config = getattr(transformers, family.config)(**_SHAPE | dict(family.overrides))
    text = text_config(config)
    kind, trained = trained_indexer(text)
    served = kind.fields if kind else frozenset[str]()
    assert fields_of(config, text, served=served) == ""
    assert bool(fields_of(text)) == bool(kind) == ("algorithm" in family.hisparse)
    if kind and trained:
        assert family.hisparse["algorithm"] == kind.feature == trained.settings["algorithm"]
        assert family.hisparse["page_size"] == trained.settings["page_size"]


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, ()),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, (1, 3)),
        ({"index_topk_pattern": "FSS"}, (1, 2)),
        ({"index_topk_freq": 3}, (2, 3)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, (3,)),
    ],
)
def test_layers_that_share_a_selection(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    """As SGLang and transformers read the fields."""
    config = DeepseekV32Config(num_hidden_layers=4, architectures=["DeepseekV32ForCausalLM"])
    for name, value in fields.items():
        setattr(config, name, value)
    spec = shape_per_rank(config, 1, 1)
    assert spec.unindexed == tuple(x for x in range(4) if dsa_layer_skips_topk(config, x)) == layers
    assert spec.num_indexers == 4 - len(layers)
    if "indexer_types" not in fields:
        other = GlmMoeDsaConfig(num_hidden_layers=4, **fields)
        assert shape_per_rank(other, 1, 1).unindexed == layers


def test_fields_that_are_off() -> None:
    off: dict[str, Any] = {"sparse_config": {}, "index_topk": None, "compress_ratios": [0, 0]}
    off |= {"index_kpool": 1, "index_topk_pattern": "FF", "use_sparse_attention": False}
    assert fields_of(LlamaConfig(**off)) == ""


def test_hugging_face_refuses_what_the_plan_knows() -> None:
    config = MiniMaxM3VLTextConfig(num_hidden_layers=3, sparse_attention_config=M3)
    with pytest.raises(ConfigError, match="^minimax_m3_vl_text was trained to .*index_topk_bl"):
        read_model_shape(config, 16)
    spec = shape_per_rank(config, 128, 2)
    assert (spec.num_layers, spec.num_kv_heads, spec.index_head_dim) == (3, 2, 128)
    _, trained = trained_indexer(config)
    assert trained is not None
    settings = {"algorithm": "msa", "page_size": 128, "budget": 2048, "num_sink_pages": 0}
    settings |= {"num_recent_pages": 0, "dense_layers": [0]}
    assert trained.settings == settings
    published = PretrainedConfig(num_hidden_layers=3, sparse_attention_config=PUBLISHED)
    assert trained_indexer(published)[1] == trained
