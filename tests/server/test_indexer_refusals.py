"""Models with an indexer of their own: what cannot be served ends the start in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusing import refusal, resolve
from settings import INFLLM, MSA, MSA_FLAGS, QSA
from tiny_models import INDEX_TOP_K, MSA_FIELDS, tiny_model

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

STORE: dict[str, Any] = {"storage": {"path": "/somewhere"}}
NGRAM, NEXTN = (f"--speculative-algorithm {name}" for name in ("NGRAM", "NEXTN"))
PREFILL, DECODE = (f"--disaggregation-mode {mode}" for mode in ("prefill", "decode"))
TRANSFER = "--disaggregation-transfer-backend mooncake_tcp"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"index_kpool": 4}, "index_kpool"),
        ({"index_local_tokens": 16}, "index_local_tokens"),
    ],
)
def test_an_indexer_that_is_not_that_of_deepseek(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    config = json.loads((tiny_model("deepseek_v32") / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(model=tmp_path, config={"algorithm": "dsa", "page_size": 1})
    assert f"ForCausalLM was trained to select by itself what it attends ({field}); ex" in message
    assert message.endswith("an indexer that an algorithm asks (hisparse algorithms)")


def test_layers_that_attend_what_others_selected() -> None:
    config, model = {"algorithm": "dsa", "page_size": 1}, tiny_model("glm_moe_dsa")
    resolve(model=model, config=config)
    for flags, more, got in (
        ((), {"dense_layers": [0]}, "dense_layers: [0]"),
        (("--pp-size", "2"), {}, "--pp-size 2"),
    ):
        message = refusal(*flags, model=model, config=config | more)
        assert f"{got} is given, and layers of GlmMoeDsaForCausalLM attend what others" in message
    fields = json.dumps({"indexer_types": ["shared", "full", "full"]})
    message = refusal("--json-model-override-args", fields, model=model, config=config)
    assert "layer 0 of GlmMoeDsaForCausalLM attends what the layer before it selected" in message


def test_a_model_with_an_indexer_is_served_by_what_asks_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = tiny_model("deepseek_v32")
    message = refusal(model=model)
    assert "DeepseekV32ForCausalLM was trained to attend what its indexer selects" in message
    assert message.endswith("expected an algorithm that asks it: dsa")
    # Such a server has an algorithm of its own, which the message must not blame on the user.
    assert refusal(*f"{TRANSFER} {PREFILL}".split(), model=model) == message
    config = {"algorithm": "dsa", "page_size": 1, "budget": 2 * INDEX_TOP_K}
    assert resolve(model=model, config=config).page_size % 16 == 0
    warned = "are (128, 1, 2); DeepseekV32ForCausalLM was trained with (64, 0, 0)"
    assert warned in capfd.readouterr().err
    message = refusal(config=config)
    assert "asks the model's indexer, which LlamaForCausalLM does not have" in message


def qwen4(folder: Path) -> Path:
    """Qwen4-Exp with a budget that SGLang's own kernels take."""
    config = json.loads((tiny_model("qwen4_exp") / "config.json").read_text())
    config["text_config"]["indexer_budget"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_whose_indexer_scores_blocks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "Qwen4ExpForConditionalGeneration"
    model = qwen4(tmp_path)

    def refused(config: dict[str, Any], *flags: str) -> str:
        # On a CPU SGLang's radix cache keeps no states of the other layers.
        return refusal("--disable-radix-cache", *flags, model=model, config=config)

    for config in ({}, {"algorithm": "dsa", "page_size": 1}):
        message = refused(config)
        assert f"{name} was trained to attend what its indexer selects" in message
        assert message.endswith("expected an algorithm that asks it: qsa")
    message = refused({"algorithm": "qsa"})
    assert f"page_size: got 16, expected 4, the tokens that {name}" in message
    served = QSA | {"budget": 1024, "device_buffer_size": 2048}
    message = refused(served, "--qsa-indexer-dtype", "fp8_e4m3")
    assert "--qsa-indexer-dtype: got fp8_e4m3 beside index_dtype 'float32', expected" in message
    message = refusal(model=model, config=served | STORE)
    assert f"storage is given, and {name} has layers of linear" in message
    for flags in (NGRAM, NEXTN, "--pp-size 2", PREFILL, DECODE):
        message = refused(served, *flags.split())
        assert f"{flags} is given, and {name} has layers of linear" in message
    resolve("--disable-radix-cache", model=model, config=served)
    warned = f"are (1024, 0, 0); {name} was trained with (2048, 0, 0)"
    assert warned in capfd.readouterr().err
    model = tiny_model("qwen4_exp")
    message = refused(QSA)
    assert f"the indexer of {name}: fast_topk_v2 requires indexer_budget / indexer_c" in message
    assert message.endswith("got 16; expected one that SGLang serves")


def m3(**changes: Any) -> str:
    """The line of MiniMax-M3's refusal, with other fields of its indexer."""
    sparse = MSA_FIELDS["sparse_attention_config"] | changes
    fields = json.dumps(MSA_FIELDS | {"sparse_attention_config": sparse})
    flags = ("--json-model-override-args", fields)
    return refusal(*flags, model=tiny_model("minimax_m3"), config=MSA)


def test_a_model_whose_indexer_scores_blocks_for_each_kv_head() -> None:
    name, folder = "MiniMaxM3SparseForCausalLM", tiny_model("minimax_m3")
    flags = MSA_FLAGS
    assert refusal(*flags, model=folder).endswith("expected an algorithm that asks it: msa")
    message = refusal(*flags, model=folder, config=MSA | {"dense_layers": [1]})
    assert f"dense_layers: got [1], expected [0], the layers of {name} without an inde" in message
    resolve(*flags, model=folder, config=MSA)
    assert f"sparse_score_type of {name}: got lse, expected max" in m3(sparse_score_type="lse")
    assert f"sparse_num_index_heads of {name}: got 4, expected 2" in m3(sparse_num_index_heads=4)
    message = m3(sparse_disable_index_value=[0, 0, 0])
    assert f"sparse_disable_index_value of {name}: got [0, 0, 0], expected [0, 1, 1]" in message
    assert f"sparse_local_block of {name}: got 0, expected at least 1" in m3(sparse_local_block=0)


def test_a_model_that_selects_by_means_of_keys() -> None:
    name, model = "MiniCPMSALAForCausalLM", tiny_model("minicpm")
    resolved = resolve(model=model, config=INFLLM)
    assert resolved.page_size % INFLLM["page_size"] == 0 and not resolved.disable_radix_cache
    assert refusal(model=model).endswith("expected an algorithm that asks it: infllm")
    message = refusal(model=model, config=INFLLM | {"page_size": 32})
    assert f"page_size: got 32, expected 16, the tokens that {name}" in message
    message = refusal(model=model, config=INFLLM | {"algorithm_config": {"blocks": 4}})
    assert f"kernel_size: got 32, expected 8, as {name} was trained" in message
    for flags in (NGRAM, PREFILL, DECODE, "--pp-size 2"):
        message = refusal(*flags.split(), model=model, config=INFLLM)
        assert "algorithm is infllm, which does not go with" in message and flags in message
    message = refusal(model=model, config=INFLLM | STORE)
    assert "algorithm is infllm, which does not go with storage yet; expected no st" in message
    sparse = json.loads((model / "config.json").read_text())["sparse_config"]
    for change, words in (
        (
            {"mixer_types": ["minicpm4", "lightning-attn", "minicpm4"]},
            "has Lightning layers; expected mixer_types",
        ),
        ({"sparse_config": sparse | {"use_nope": True}}, "use_nope of"),
        ({"sparse_config": sparse | {"window_size": 24}}, "window_size of"),
    ):
        fields = json.dumps(change)
        message = refusal("--json-model-override-args", fields, model=model, config=INFLLM)
        assert name in message and words in message
