"""Models that cannot be served, or not as asked, end the start in one line before they load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusing import refusal, resolve
from tiny_models import INDEX_TOP_K, tiny_model

from scripts.model_families import FAMILIES

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_heads_that_share_a_latent_cannot_select_apart() -> None:
    config = {"selection_scope": "query_head"}
    message = refusal(model=tiny_model("deepseek_v2"), config=config)
    assert "'query_head' does not go with" in message
    assert "latent attention (MLA) (choices: kv_head, layer; algorithms that can: none)" in message


def test_a_model_with_an_indexer_is_served_by_what_asks_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = tiny_model("deepseek_v32")
    message = refusal(model=model)
    assert "DeepseekV32ForCausalLM was trained to attend what its indexer selects" in message
    assert message.endswith("expected one that does: dsa")
    config = {"algorithm": "dsa", "page_size": 1, "budget": 2 * INDEX_TOP_K}
    assert resolve(model=model, config=config).page_size % 16 == 0
    warned = "are (128, 1, 2); DeepseekV32ForCausalLM was trained with (64, 0, 0)"
    assert warned in capfd.readouterr().err
    message = refusal(config=config)
    assert "asks the model's indexer, which LlamaForCausalLM does not have" in message


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 128,
            "max_window_layers": 0,
        },
    ],
    ids=["mistral", "qwen2"],
)
def test_a_sliding_window_of_the_configuration_is_no_reason_to_refuse_a_model(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """SGLang's Mistral and Qwen2 do not read it. The layers of a loaded model say what they do."""
    config = json.loads((tiny_model("llama") / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolved = resolve(model=tmp_path, config={})
    assert resolved.disable_hybrid_swa_memory


def _family(name: str, folder: Path) -> Path:
    return next(family for family in FAMILIES if family.name == name).write(folder)


HYBRID_FAMILIES = ("Qwen3-Next", "Kimi Linear", "LFM2", "Falcon H1", "Granite 4 hybrid")


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_a_hybrid_starts_without_a_radix_cache(name: str, tmp_path: Path) -> None:
    """SGLang keeps the states of its layers there on a GPU alone, or in pages of one token."""
    model = _family(name, tmp_path)
    message = refusal(model=model)
    assert "hisparse: error: SGLang does not serve " in message
    assert message.endswith("; expected others, such as --disable-radix-cache")
    assert resolve("--disable-radix-cache", model=model).page_size == 16


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-algorithm", "NGRAM"),
        ("--pp-size", "2"),
        ("--tp-size", "2", "--attn-dp-size", "2"),
        ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake_tcp"),
    ],
    ids=lambda flags: flags[0],
)
def test_a_hybrid_with_a_flag_that_it_is_not_served_with(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    model = _family("LFM2", tmp_path)
    message = refusal("--disable-radix-cache", *flags, model=model)
    assert " and Lfm2ForCausalLM has layers of linear attention, convolution or a" in message
    assert message.endswith("which hisparse does not support together yet; expected the flag unset")


def test_a_hybrid_with_a_store(tmp_path: Path) -> None:
    """A store would keep K and V of a prefix without the states of the other layers."""
    config = {"storage": {"path": "/somewhere"}}
    message = refusal(model=_family("Qwen3-Next", tmp_path), config=config)
    assert "(storage) is True, and Qwen3NextForCausalLM has layers" in message


def test_a_model_without_attention(tmp_path: Path) -> None:
    message = refusal(model=_family("Mamba", tmp_path))
    assert message.endswith(
        "MambaForCausalLM has no layer that attends; expected attention in some layers"
    )


@pytest.mark.parametrize("name", ["gpt-oss", "EXAONE 4"])
def test_sglang_does_not_refuse_a_model_by_the_name_of_the_backend(
    name: str, tmp_path: Path
) -> None:
    """What can be served is for hisparse to say; SGLang would end with an AssertionError."""
    assert resolve(model=_family(name, tmp_path)).page_size == 16


def test_sglang_checks_the_other_backends(tmp_path: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    model = _family("gpt-oss", tmp_path)
    line = ["--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native"]
    with pytest.raises(AssertionError, match="requires one of"):
        prepare_server_args(line).resolve_once()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swa_head_dim": 16}, "2 x 32 KV heads and 2 x 16 KV heads"),
        ({"swa_num_key_value_heads": 1}, "2 x 32 KV heads and 1 x 32 KV heads"),
        ({"num_attention_heads_per_layer": [4, 4, 8]}, "4 query heads and 8 query heads"),
    ],
)
def test_heads_that_differ_between_layers(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((tiny_model("llama") / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"LlamaForCausalLM has layers with {words}; " in refusal(model=tmp_path)
