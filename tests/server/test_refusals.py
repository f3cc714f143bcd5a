"""What cannot be served ends the start in one line, before the model loads."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Server
from refusing import refusal, resolve, server_args
from tiny_models import tiny_model

from hisparse.errors import ConfigError
from hisparse.sglang.features import IN_USE
from hisparse.sglang.features.storage import check_told_apart
from scripts.model_families import FAMILIES

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

#: LLAMA stands for the folder of the tiny model, which is made when it is needed.
DRAFT = "--speculative-draft-model-path LLAMA"
NGRAM = "--speculative-algorithm NGRAM"
STANDALONE = "--speculative-algorithm STANDALONE"
PREFILL, DECODE = (f"--disaggregation-mode {mode}" for mode in ("prefill", "decode"))
TRANSFER = "--disaggregation-transfer-backend mooncake_tcp"
LINKER = '{"linker":"Other","linker_module_path":"other"}'
HOOKS = '[{"name":"a","target_modules":["model.layers.*"],"hook_factory":"a:b"}]'
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
STORE: dict[str, Any] = {"storage": {"path": "/somewhere"}}

Refused = tuple[str, dict[str, Any] | None, str]


def apart(mode: str, got: str, expected: str) -> str:
    """The end of the line for a mode with its value, and what it does not go with."""
    flag, value = mode.split()
    return f" {flag} is {value}, which does not go with {got} yet; expected {expected}"


#: Flags of SGLang that are not supported with any other.
UNSUPPORTED = [
    "--speculative-algorithm EAGLE --speculative-eagle-topk 4",
    "--speculative-algorithm DFLASH",
    "--enable-hierarchical-cache",
    "--enable-lmcache",
    "--enable-hisparse",
    "--disaggregation-transfer-backend nixl",
    "--disaggregation-decode-retraction-backup host_pool",
    "--disaggregation-decode-host-receive-threshold 0.5",
    "--disaggregation-enable-kv-checksum",
    "--enable-pd-role-switch",
    "--tp-size 2 --attn-cp-size 2",
    "--tp-size 2 --dcp-size 2",
    "--enable-streaming-session",
    "--kv-cache-dtype bfloat16",
    "--enable-memory-saver",
    "--enable-kv-cache-sharding",
    "--enable-unified-memory",
    "--enable-page-major-kv-layout",
    "--prefill-only-disable-kv-cache",
    "--enable-two-batch-overlap",
    "--enable-pdmux",
    "--enable-deterministic-inference",
]

REFUSED: list[Refused] = [
    *((line, None, line.rpartition("--")[2].split()[0]) for line in UNSUPPORTED),
    ("", {"host_memory": "900TiB"}, "host_memory: got '900TiB'"),
    # Captured steps.
    ("", {"cuda_graph": True, "checked": True}, "got true and checked true"),
    ("", {"cuda_graph": "on"}, 'expected "auto" or true or false'),
    ("", {"cuda_graph": True}, "the device is cpu; expected"),
    *(
        (f"{flag} full", None, f"{flag} is full; expected disabled")
        for flag in ("--cuda-graph-backend-prefill", "--cuda-graph-backend-decode")
    ),
    # hisparse for one phase only.
    ("--prefill-attention-backend torch_native", None, "prefill "),
    ("--decode-attention-backend torch_native", None, "decode "),
    # Pages. With those of one token SGLang serves beam search, which would take a row's history
    # from under it.
    *(
        (f"--page-size {size}", None, f"page_size is 16 but --page-size is {size}")
        for size in (1, 8, 24)
    ),
    ("--page-size 1", {"page_size": 1}, "--page-size is 1; expected 2 or more"),
    # Eight bits.
    ("--kv-cache-dtype mxfp8", None, "or fp8_e4m3"),
    ("--kv-cache-dtype bf16", FP8, "kv_cache_dtype is fp8_e4m3 but --kv-cache-dtype is bf16"),
    ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "int8"},
     "kv_cache_dtype is int8 but --kv-cache-dtype is fp8_e4m3"),
    ("", {"kv_cache_dtype": "fp8_e5m2"},
     "unknown kv_cache_dtype 'fp8_e5m2'; did you mean 'fp8_e4m3'?"),
    # Prefill and decode servers.
    *(
        (f"{TRANSFER} {mode} --tp-size 2", None, apart(mode, "--tp-size 2", "--tp-size 1"))
        for mode in (PREFILL, DECODE)
    ),
    (f"{TRANSFER} {DECODE}", {"host_layout": "page_first"},
     apart(DECODE, "host_layout: page_first", "host_layout: layer_first")),
    (f"{TRANSFER} {DECODE}", STORE, apart(DECODE, "storage", "no storage")),
    (f"{TRANSFER} {DECODE}", {"algorithm": "snapkv"},
     apart(DECODE, "algorithm snapkv, which needs queries of a prompt's last 32 tokens",
           "an algorithm that needs only K: sketch, quest")),
    # A store, whose keys do not name all that could change a page: experts move between ranks, a
    # fingerprint of offloaded weights lacks some.
    ("--disable-radix-cache", STORE, "--disable-radix-cache is given, but storage"),
    (f"--unified-cache-external-linker-config {LINKER}", STORE, "storage is set and --unified"),
    ("--enable-unified-cache-external-linker", None, "expected it unset, and storage"),
    (f"--forward-hooks {HOOKS}", STORE,
     "storage: got --forward-hooks, whose code may change K and V; expected no st"),
    ("--enable-eplb", STORE, apart("--enable-eplb true", "storage", "no storage")),
    ("--offload-group-size 4 --offload-mode sharded_gpu", STORE,
     apart("--offload-mode sharded_gpu", "storage", "no storage")),
    # Drafts.
    (STANDALONE, None, "without --speculative-draft-model-path; expected"),
    (f"{STANDALONE} {DRAFT} --speculative-eagle-topk 2", None,
     "--speculative-eagle-topk is 2; expected 1"),
    (f"{STANDALONE} {DRAFT} --speculative-draft-attention-backend triton", None,
     "--speculative-draft-attention-backend is triton; expected it unset"),
    *(
        (f"{STANDALONE} {DRAFT} {flag}", None, f"does not go with {flag} yet")
        for flag in ("--enable-multi-layer-eagle", "--enable-mixed-chunk",
                     "--speculative-draft-kv-cache-dtype fp8_e4m3")
    ),
    (NGRAM, {"tail_estimate": True}, apart(NGRAM, "tail_estimate", "no extension")),
    (NGRAM, STORE, apart(NGRAM, "storage", "no storage")),
    # Ranks and replicas.
    *(
        (f"--tp-size 2 {flag} 2", config, apart(f"{flag} 2", got, expected))
        for flag, config, got, expected in (
            ("--pp-size", STORE, "storage", "no storage"),
            ("--pp-size", {"trace": "/somewhere"}, "trace", "no extension that needs all layers"),
            ("--pp-size", {"reuse_layers": 2}, "reuse_layers: 2", "reuse_layers: 1"),
            ("--attn-dp-size", STORE, "storage", "no storage"),
            ("--attn-dp-size", {"cuda_graph": True}, "cuda_graph: true", 'cuda_graph: "auto"'),
        )
    ),
    *(
        (f"{flag} 2 {TRANSFER} {mode}", None, apart(mode, f"{flag} 2", f"{flag} 1"))
        for flag in ("--pp-size", "--attn-dp-size", "--dp-size")
        for mode in (NGRAM, DECODE)
    ),
    (f"{NGRAM} {TRANSFER} {DECODE}", None, apart(DECODE, NGRAM, "no --speculative-algorithm")),
]  # fmt: skip


def words_of(flags: str) -> list[str]:
    return flags.replace("LLAMA", str(tiny_model("llama"))).split()


@pytest.mark.parametrize("flags, config, words", REFUSED)
def test_what_is_refused(flags: str, config: dict[str, Any] | None, words: str) -> None:
    assert words in refusal(*words_of(flags), config=config)


@pytest.mark.parametrize("name", ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_USE_HND_KVCACHE"])
def test_an_environment_variable_that_changes_the_pool(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert name in refusal()


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{")
    assert str(path) in refusal(config=f"@{path}")


def changed_llama(folder: Path, **change: Any) -> Path:
    config = json.loads((tiny_model("llama") / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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
    model = changed_llama(tmp_path, **change)
    assert f"LlamaForCausalLM has layers with {words}; " in refusal(model=model)


SELECTING: list[tuple[dict[str, Any], str]] = [
    (
        {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1]},
        },
        "sparse_attention_config",
    ),
    (
        {
            "architectures": ["MiniCPMSALAForCausalLM"],
            "model_type": "minicpm_sala",
            "sparse_config": {"topk": 64},
        },
        "sparse_config",
    ),
    ({"sparse_topk": 64}, "sparse_topk"),
    ({"index_topk": 64, "index_n_heads": 4}, "index_n_heads, index_topk"),
    (
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "compress_ratios": [0, 4, 128],
            "sliding_window": 128,
            "index_head_dim": 128,
        },
        "compress_ratios, index_head_dim",
    ),
]


@pytest.mark.parametrize(("change", "fields"), SELECTING, ids=lambda x: str(x)[:40])
def test_a_model_that_selects_by_itself(
    tmp_path: Path, change: dict[str, object], fields: str
) -> None:
    message = refusal("--disable-radix-cache", model=changed_llama(tmp_path, **change))
    name, *_ = change.get("architectures", ["LlamaForCausalLM"])
    assert f"{name} was trained to select by itself what it attends ({fields}); expec" in message


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip


def test_a_store_of_a_model_whose_pages_depend_on_more_than_their_tokens(tmp_path: Path) -> None:
    model = changed_llama(tmp_path, rope_parameters=LONGROPE, head_dim=16)
    assert "storage: got a model with longrope" in refusal(model=model, config=STORE)
    resolve(model=model, config={})
    server = SimpleNamespace(forward_hooks=None)
    text = SimpleNamespace(rope_parameters={"rope_type": "default"})
    for is_multimodal in (False, True):
        model = SimpleNamespace(hf_text_config=text, is_multimodal=is_multimodal)
        with pytest.raises(ConfigError) if is_multimodal else nullcontext():
            check_told_apart(server, model)


def test_heads_that_share_a_latent_cannot_select_apart() -> None:
    config = {"selection_scope": "query_head"}
    message = refusal(model=tiny_model("deepseek_v2"), config=config)
    assert "'query_head' does not go with" in message
    assert "latent attention (MLA) (choices: kv_head, layer; algorithms that can: none)" in message


def family(name: str, folder: Path) -> Path:
    return next(family for family in FAMILIES if family.name == name).write(folder)


@pytest.mark.parametrize(
    "name", ["Qwen3-Next", "Kimi Linear", "LFM2", "Falcon H1", "Granite 4 hybrid"]
)
def test_a_hybrid_starts_without_a_radix_cache(name: str, tmp_path: Path) -> None:
    """SGLang keeps the states of its layers there only on a GPU, or in pages of one token."""
    model = family(name, tmp_path)
    message = refusal(model=model)
    assert "hisparse: error: SGLang does not serve " in message
    assert message.endswith("; expected others, such as --disable-radix-cache")
    assert resolve("--disable-radix-cache", model=model).page_size == 16


@pytest.mark.parametrize(
    "flags", [NGRAM, "--pp-size 2", "--tp-size 2 --attn-dp-size 2", f"{PREFILL} {TRANSFER}"]
)
def test_a_hybrid_with_a_flag_that_it_is_not_served_with(flags: str, tmp_path: Path) -> None:
    model = family("LFM2", tmp_path)
    message = refusal("--disable-radix-cache", *flags.split(), model=model)
    assert " and Lfm2ForCausalLM has layers of linear attention, convolution or a" in message
    assert "which hisparse does not support together yet; expected " in message


def test_a_hybrid_with_a_store(tmp_path: Path) -> None:
    """A store would keep K and V of a prefix without the states of the other layers."""
    message = refusal(model=family("Qwen3-Next", tmp_path), config=STORE)
    assert "storage is given, and Qwen3NextForCausalLM has layers" in message


def test_a_model_without_attention(tmp_path: Path) -> None:
    message = refusal(model=family("Mamba", tmp_path))
    assert message.endswith(
        "MambaForCausalLM has no layer that attends; expected attention in some layers"
    )


def test_sglang_checks_the_other_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_USE, "")
    args = server_args("--attention-backend", "torch_native", model=family("gpt-oss", tmp_path))
    with pytest.raises(AssertionError, match="requires one of"):
        args.resolve_once()


def test_the_command_line_ends_with_one_line(tmp_path: Path) -> None:
    server = Server(tiny_model("llama"), tmp_path / "log", config={"budgt": 512})
    line = server.refusal()
    assert line.startswith("hisparse: error: unknown config key 'budgt'; did you mean 'budget'?")
    assert "Load weight begin" not in server.log(), "the model was loaded before the refusal"
    assert "Traceback" not in server.log()


def test_too_little_memory_for_one_request_names_the_term(tmp_path: Path) -> None:
    """Known only when the model's shape is: the message stands in the log, once."""
    config = {"host_memory": "1MB", "budget": 1024}
    line = Server(tiny_model("llama"), tmp_path / "log", config=config).refusal()
    assert "host_memory: got" in line and "one request" in line
