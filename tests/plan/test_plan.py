"""``hisparse plan``: its numbers are those of the sizing formula, and its command keeps to them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.memory.sizing import size
from hisparse.model_config import count_weight_bytes
from hisparse.plan.fit import Capacity, Machine, fit
from hisparse.plan.shapes import shape_per_rank
from tests.command import Command
from tests.shapes import LLAMA, TOKEN_BYTES

GIB = 2**30

H200 = Machine(
    device_bytes=141 * GIB, host_bytes=1024 * GIB, tp=1, weight_bytes=15 * GIB, mem_fraction=0.85
)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 16, "qk_nope_head_dim": 16}


def again(capacity: Capacity, requests: int, pool_mib: int) -> tuple[int, int]:
    """Requests and contexts that the formula gives for other numbers."""
    assert capacity.sizing is not None
    request = replace(capacity.sizing.request, max_requests=requests, host_bytes=pool_mib * 2**20)
    sizing = size(request)
    return sizing.max_requests, sizing.kv_tokens // capacity.context


def pool_mib(capacity: Capacity) -> int:
    return int(str(capacity.host_memory).removesuffix("MiB"))


@pytest.mark.parametrize("algorithm", ["quest", "sketch", "streaming"])
@pytest.mark.parametrize("context", [8192, 32768, 131072])
def test_as_many_requests_as_fit_and_no_more(algorithm: str, context: int) -> None:
    found = fit(HiSparseConfig(algorithm=algorithm), LLAMA, H200, context)
    most, pool = found.max_requests, pool_mib(found)
    assert again(found, most, pool) == (most, max(most, again(found, most, pool)[1]))
    whole = int(0.7 * 1024 * GIB) // 2**20
    if context == 131072 and algorithm != "quest":
        assert found.limit == "host_memory"
    least = -(-((most + 1) * context + 16) * TOKEN_BYTES // 2**20)
    if found.limit == "host_memory":
        assert least > whole
    else:
        assert min(again(found, most + 1, least)) <= most
    assert found.dense_max_requests == H200.cache_bytes // (context * 131072)


def test_a_pool_is_only_made_smaller_where_that_makes_room() -> None:
    """At 8k, representations of the whole host memory would take the place of requests."""
    short = fit(HiSparseConfig(), LLAMA, H200, 8192)
    whole = int(0.7 * 1024 * GIB) // 2**20
    assert pool_mib(short) < whole
    assert again(short, short.max_requests, whole)[0] < short.max_requests
    assert again(short, short.max_requests, pool_mib(short) + 16)[0] < short.max_requests
    assert pool_mib(fit(HiSparseConfig(), LLAMA, H200, 131072)) == whole


def test_bytes_of_a_request() -> None:
    found = fit(HiSparseConfig(budget=2048), LLAMA, H200, 32768)
    assert found.host_bytes_per_request == 32768 * TOKEN_BYTES
    assert found.host_bytes_per_token == 131072
    # A sketch of a page of 16 in 32 layers and 8 heads: a byte a channel, a scale for 8 of them,
    # two bits a token, a scale and a number for each of the 40 detailed ones.
    representations = 32 * 8 * (128 + 128 // 8 + 40 * (16 // 4 + 2)) // 16
    # 8 bytes of the GPU's page tables for 4 KiB.
    mapping = 131072 * 8 // 4096
    assert found.device_bytes_per_token == representations + mapping
    pages = 32 * 8 * (4096 // 16 + 1) * 16 * 256 * 2
    tables = found.device_bytes_per_request - pages - 32768 * (representations + mapping)
    assert 0 < tables < 0.02 * pages


def test_what_does_not_fit_says_why() -> None:
    small = replace(H200, host_bytes=GIB)
    found = fit(HiSparseConfig(), LLAMA, small, 131072)
    assert (found.max_requests, found.limit) == (0, "host_memory")
    assert found.message.startswith("one request does not fit")
    tiny = fit(HiSparseConfig(), LLAMA, replace(H200, device_bytes=18 * GIB), 8192)
    assert (tiny.max_requests, tiny.limit, tiny.sizing) == (0, "device_memory", None)
    assert tiny.message.startswith("device_memory: got 307")
    with pytest.raises(ConfigError, match="the weights alone take 15 GiB a GPU"):
        fit(HiSparseConfig(), LLAMA, replace(H200, device_bytes=16 * GIB), 8192)


def test_shapes_of_ranks() -> None:
    config = LlamaConfig(**SMALL, dtype="bfloat16")
    one = shape_per_rank(config, 16, 1)
    assert (one.num_q_heads, one.num_kv_heads, one.head_dim) == (8, 2, 8)
    assert format_of(one).token_bytes == 128
    four = shape_per_rank(config, 16, 4)
    assert (four.num_q_heads, four.num_kv_heads) == (2, 1), "KV heads are repeated"
    assert shape_per_rank(LlamaConfig(**SMALL), 16, 1).dtype == torch.float16, "as SGLang has it"
    with pytest.raises(ConfigError, match=r"--tp: got 3, expected a divisor of the model's"):
        shape_per_rank(config, 16, 3)


def test_windows_are_those_that_sglang_reads() -> None:
    layers = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 128}
    for config in (
        MistralConfig(**SMALL, sliding_window=128),
        Qwen2Config(**SMALL, **layers),
        Qwen3Config(**SMALL, **layers),
    ):
        assert shape_per_rank(config, 16, 1).windows == ()
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    gemma = Gemma3TextConfig(**SMALL, **kinds, sliding_window=128)
    assert shape_per_rank(gemma, 16, 1).windows == (128, 0)


def test_layers_with_a_window_keep_k_and_v_and_no_representations() -> None:
    half = replace(LLAMA, windows=(1024, 0) * (LLAMA.num_layers // 2))
    found = [fit(HiSparseConfig(algorithm="quest"), spec, H200, 32768) for spec in (LLAMA, half)]
    assert [x.host_bytes_per_token for x in found] == [TOKEN_BYTES] * 2
    # Beside a GPU's page tables, which map both.
    scored = [x.device_bytes_per_token - TOKEN_BYTES // 512 for x in found]
    assert 0 < 2 * scored[1] == scored[0]


def llama(layers: int, kv_heads: int) -> LlamaConfig:
    heads = {"num_attention_heads": 64, "num_key_value_heads": kv_heads}
    return LlamaConfig(hidden_size=64 * 128, num_hidden_layers=layers, **heads, dtype="bfloat16")


@pytest.mark.parametrize(
    ("model", "token_bytes"),
    [
        # 61 layers with latents of 512 and 64.
        (DeepseekV3Config(dtype="bfloat16"), 70_272),
        (llama(80, kv_heads=8), 320 * 1024),
        (llama(80, kv_heads=64), 2560 * 1024),
        (MiniMaxM2Config(num_hidden_layers=62, head_dim=128, dtype="bfloat16"), 248 * 1024),
    ],
    ids=["DeepSeek-V3", "Llama-3.1-70B", "LLaMA-65B", "MiniMax-M2"],
)
def test_bytes_of_a_token(model: PretrainedConfig, token_bytes: int) -> None:
    """As published examples have them."""
    assert format_of(shape_per_rank(model, 16, 1)).token_bytes == token_bytes


def test_shapes_of_latents() -> None:
    v2 = shape_per_rank(DeepseekV2Config(**SMALL, **LATENT, dtype="bfloat16"), 16, 4)
    assert (v2.attention, v2.num_kv_heads, v2.head_dim, v2.v_head_dim) == ("MLA", 1, 576, 512)
    assert (format_of(v2).token_bytes, v2.index_head_dim) == (2 * 576 * 2, 0)
    v32 = DeepseekV32Config(**SMALL, **LATENT, index_head_dim=128, index_topk=64)
    assert shape_per_rank(v32, 1, 1).index_head_dim == 128


def test_weights_are_counted() -> None:
    for tied in (False, True):
        config = LlamaConfig(**SMALL, tie_word_embeddings=tied)
        model = LlamaForCausalLM(config)
        assert count_weight_bytes(config, torch.bfloat16) == 2 * model.num_parameters()
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match=r"--weights: got nothing for a quantized model"):
        count_weight_bytes(config, torch.bfloat16)


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(
        tmp_path
    )
    return str(tmp_path)


Planned = Callable[..., Any]
MEMORY = ["--device-memory", "1GiB", "--host-memory", "8GiB"]


@pytest.fixture
def planned(model: str, command: Command) -> Planned:
    """What ``hisparse plan`` prints as JSON for the small model; other flags win over these."""
    return lambda *line: command.json("plan", "--model", model, *MEMORY, *line)


def test_eight_bits_hold_nearly_twice_the_tokens(planned: Planned) -> None:
    """From bfloat16, with a scale for each vector."""
    line = ["--context", "2048"]
    plain = planned(*line, "--budget", "256")
    eight = planned(*line, "--config", '{"budget": 256, "kv_cache_dtype": "fp8_e4m3"}')
    token_bytes = (plain["bytes_per_token"], eight["bytes_per_token"])
    assert token_bytes == (2 * 2 * 2 * 8 * 2, 2 * 2 * 2 * 9)
    ours, before = eight["hisparse"], plain["hisparse"]
    assert ours["host_bytes_per_request"] == 2048 * 72
    assert ours["device_bytes_per_request"] < before["device_bytes_per_request"]
    assert ours["max_requests"] > before["max_requests"]
    # SGLang's fp8 pool has no scales for vectors.
    assert eight["dense"]["max_requests"] >= 2 * plain["dense"]["max_requests"]
    words = shlex.split(eight["command"])
    config = HiSparseConfig.parse(words[words.index("--hisparse-config") + 1])
    assert config.kv_cache_dtype == "fp8_e4m3"


def test_json(planned: Planned) -> None:
    line = ["--context", "2048,4096", "--algorithm", "quest,sketch"]
    found = planned(*line, "--budget", "256,512")
    assert len(found["plans"]) == 8
    assert found["bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    first = found["plans"][0]
    assert {name: found[name] for name in first} == first
    assert (first["algorithm"], first["budget"], first["context"]) == ("quest", 256, 2048)
    for plan in found["plans"]:
        words = shlex.split(plan["command"])
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        config = HiSparseConfig.parse(flags["--hisparse-config"])
        assert (config.algorithm, config.budget) == (plan["algorithm"], plan["budget"])
        assert flags["--context-length"] == str(plan["context"])
        assert flags["--max-running-requests"] == str(plan["hisparse"]["max_requests"])
        assert plan["hisparse"]["host_bytes_per_request"] == plan["context"] * 128
        assert plan["dense"]["max_requests"] > 0


def test_estimates_of_time(planned: Planned) -> None:
    line = ["--context", "128,2048", "--budget", "256", "--weights", "69MB"]
    found = planned(*line, "--gpu", "b200", "--batch", "1,4", "--hit-ratio", "0.5,1")
    short, long = (plan["estimates"] for plan in found["plans"])
    assert found["estimates"] == short
    assert [(step["batch"], step["hit_ratio"]) for step in long] == [
        (batch, hits) for batch in (1, 4) for hits in (0.5, 1.0)
    ]
    at = [(step["batch"], step["hit_ratio"]) for step in short]
    assert at == [(1, 1.0), (4, 1.0)], "the context is on the device"
    # 69 MB at 6,900 GB/s, and two layers of two launches and the smallest attention kernel.
    assert long[0]["dense_ms_per_token"] == pytest.approx(0.01 + 2 * (2 * 2 + 11) / 1000)
    many, few = (step["hisparse_ms_per_token"] for step in long[:2])
    assert many > few > long[0]["dense_ms_per_token"]
    about = found["estimate"]
    assert (about["measured"], about["gpu"]) == (False, "b200")
    assert about["assumptions"]


def test_a_plan_says_which_way_of_missing_pages_its_times_are_of(planned: Planned) -> None:
    one, two = (planned("--config", f'{{"miss": "{miss}"}}') for miss in ("transfer", "host"))
    assert one["estimates"] == two["estimates"]
    more = {*two["estimate"]["assumptions"]} - {*one["estimate"]["assumptions"]}
    assert [x for x in more if "transfer" in x] == [*more] != []


def test_the_table_says_that_its_times_are_estimates(
    model: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = command("plan", "--model", model, *MEMORY, "--budget", "256", "--gpu", "gh200")
    assert "Estimated, not measured: ms per token, gh200" in out
    assert out.index("Assumed:") < out.index("python -m sglang")
    # Batches of 1 and 8, three hit ratios each.
    assert len([line for line in out.splitlines() if line.split()[3:5] == ["8", "85%"]]) == 1
    assert len([line for line in out.splitlines() if line.split()[3:5] == ["1", "100%"]]) == 1


def test_defaults_are_the_models_own(tmp_path: Path, planned: Planned) -> None:
    assert planned()["context"] == 4096
    options = {"index_head_dim": 128, "index_topk": 64}
    DeepseekV32Config(**SMALL, **LATENT, **options).save_pretrained(tmp_path / "dsa")
    found = planned("--model", str(tmp_path / "dsa"), "--weights", "100MiB")
    assert (found["algorithm"], found["budget"], found["weight_bytes"]) == ("dsa", 64, 100 * 2**20)
    config = '{"algorithm": "quest", "budget": 512, "page_size": 32}'
    found = planned("--config", config)
    assert '"page_size": 32' in found["command"]


def test_layers_that_share_a_selection_are_planned_together(
    tmp_path: Path, command: Command
) -> None:
    options = {"index_head_dim": 128, "index_topk": 64, "indexer_types": ["full", "shared"]}
    GlmMoeDsaConfig(**SMALL, **LATENT, **options).save_pretrained(tmp_path)
    line = ["--model", str(tmp_path), *MEMORY, "--weights", "100MiB"]
    assert command.json("plan", *line)["hisparse"]["device_bytes_per_token"] < 2 * 132
    dense = ["--config", '{"algorithm": "dsa", "page_size": 1, "dense_layers": [1]}']
    message = command.refused("plan", *line, *dense)
    assert (
        "dense_layers: [1] is given, and layers of glm_moe_dsa attend what others selected"
        in message
    )


@pytest.mark.parametrize(
    ("algorithms", "reason"),
    [
        (
            ["--config", '{"algorithm": "dipr", "algorithm_config": {"index": "flat"}}'],
            "device cuda, expected cpu",
        ),
        (["--algorithm", "quest,dsa"], "asks the model's indexer"),
    ],
)
def test_an_algorithm_that_the_server_would_refuse(
    algorithms: list[str], reason: str, model: str, command: Command
) -> None:
    """The server runs on CUDA, where every key in host memory cannot be read."""
    line = ["--context", "1024,2048", *algorithms]
    assert reason in command.refused("plan", "--model", model, *MEMORY, *line)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device-memory", "24"], "--device-memory: got '24', expected a size such as '64GiB'"),
        (["--context", "8192"], "--context: got 8192, expected at most 4096"),
        (["--tp", "0"], "--tp: got '0', expected a number of at least 1"),
        (["--algorithm", "dsa"], "asks the model's indexer, which llama does not have"),
        (["--algorithm", "quset"], "did you mean 'quest'"),
        (["--budget", "100"], "budget: got 100, expected a multiple of page_size"),
        (["--gpu", "h300"], "--gpu: got 'h300', expected h100, h100-pcie, h200, b200, gh200"),
        (["--model", "no/where/here"], "unknown model 'no/where/here'"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], words: str, model: str, command: Command) -> None:
    assert words in command.refused("plan", "--model", model, *MEMORY, *flags)


@pytest.mark.parametrize("ratio", ["1.5", "-0.1", "nan", "", "most"])
def test_a_hit_ratio_is_a_fraction(ratio: str, model: str, command: Command) -> None:
    line = command.refused("plan", "--model", model, *MEMORY, f"--hit-ratio={ratio}")
    assert f"--hit-ratio: got '{ratio}', expected fractions from 0 to 1" in line


def test_without_a_gpu_its_memory_has_to_be_given(
    model: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device-memory: got nothing" in command.refused("plan", "--model", model)
