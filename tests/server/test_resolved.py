"""What a command line that can be served is resolved to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusing import resolve, server_args
from test_refusals import DRAFT, FP8, NGRAM, STANDALONE, changed_llama, family, words_of

from hisparse.config import HiSparseConfig
from hisparse.engine import capabilities
from hisparse.errors import ConfigError
from hisparse.sglang.features import IN_USE
from hisparse.sglang.server_args import _check_graphs, prepare_before_resolution

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")


def config_of(*flags: str, config: object = None) -> HiSparseConfig:
    return HiSparseConfig.parse(resolve(*flags, config=config).hisparse_config)


def test_kernels_are_built_before_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says it is ready has nothing left to compile."""
    built = list[str]()
    monkeypatch.setattr("hisparse.kernels.build.ahead.cpu_library", lambda: built.append("cpu"))
    resolve()
    assert built == ["cpu"]


def test_what_can_be_served_is_not_refused() -> None:
    resolve("--page-size", "64", config={"top_k": 512})
    resolve("--chunked-prefill-size", "256", "--kv-cache-dtype", "auto")
    assert resolve(config={"page_size": 32}).page_size == 32
    assert resolve(config={"page_size": 1}).page_size == 16


def test_fp8_by_the_flag_or_by_the_key() -> None:
    config, flag = FP8 | {"budget": 512, "dense_layers": [1]}, ("--kv-cache-dtype", "fp8_e4m3")
    both, key = config_of(*flag, config=config), config_of(config=config)
    assert key == both
    assert key.effective() == HiSparseConfig.from_dict(config).effective()
    assert config_of(*flag).effective() == HiSparseConfig(kv_cache_dtype="fp8_e4m3").effective()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no-kernels"])
@pytest.mark.parametrize(
    "config, captured",
    [
        ({}, True),
        ({"cuda_graph": True, "dense_layers": [0], "min_sparse_context": 8192}, True),
        ({"cuda_graph": False}, False),
        ({"checked": True}, False),
    ],
    ids=["default", "true", "false", "checked"],
)
def test_a_gpu_captures_decode_steps_where_it_can(
    config: object, captured: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "why_no_cuda", lambda: None if kernels else "no nvcc found")
    monkeypatch.setenv(IN_USE, "")
    args = server_args("--device", "cuda", config=config)
    prepare_before_resolution(args)
    captured = captured and kernels
    assert args.disable_cuda_graph is not captured
    assert args.disable_prefill_cuda_graph is captured


def test_a_gpu_without_kernels_is_not_asked_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "why_no_cuda", lambda: "no nvcc found")
    message = r'got true, but there are no CUDA kernels \(no nvcc found\); expected "auto" or false'
    with pytest.raises(ConfigError, match=message):
        _check_graphs(HiSparseConfig(cuda_graph=True), SimpleNamespace(device="cuda"))


def test_a_cpu_captures_nothing() -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    graphs = resolved_view(resolve()).cuda_graph_config
    assert graphs.decode.backend == graphs.prefill.backend == "disabled"


def test_ranks_with_requests_of_their_own_capture_nothing() -> None:
    ranks = ("--tp-size", "2")
    for flags in (("--attn-dp-size", "2"), ("--dp-size", "2", "--enable-dp-attention")):
        assert config_of(*ranks, *flags).cuda_graph is False


def test_replicas_get_the_bytes_that_were_free_before_the_first() -> None:
    """A fraction of what a replica finds would be less for each of them."""
    found = config_of("--dp-size", "2").host_memory
    assert isinstance(found, int) and found > 2**20
    assert config_of().host_memory == 0.7


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (NGRAM, {"speculative_ngram_max_bfs_breadth": 1}),
        (f"{NGRAM} --speculative-ngram-max-bfs-breadth 1", {}),
        (
            f"{STANDALONE} {DRAFT}",
            {"speculative_num_steps": 3, "speculative_draft_attention_backend": "hisparse_draft"},
        ),
        (
            f"{STANDALONE} {DRAFT} --speculative-num-draft-tokens 8",
            {"speculative_num_steps": 7, "speculative_eagle_topk": 1},
        ),
        (
            f"{STANDALONE} {DRAFT} --speculative-num-steps 5 --speculative-num-draft-tokens 9",
            {"speculative_num_draft_tokens": 6, "speculative_eagle_topk": 1},
        ),
    ],
)
def test_drafts_are_chains(flags: str, expected: dict[str, Any]) -> None:
    """SGLang's defaults are trees, and its draft models attend only on a GPU."""
    view = resolve(*words_of(flags))
    assert {name: getattr(view, name) for name in expected} == expected


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
    assert resolve(model=changed_llama(tmp_path, **change), config={}).disable_hybrid_swa_memory


@pytest.mark.parametrize("name", ["gpt-oss", "EXAONE 4"])
def test_sglang_does_not_refuse_a_model_by_the_name_of_the_backend(
    name: str, tmp_path: Path
) -> None:
    """What can be served is for hisparse to say; SGLang would end with an AssertionError."""
    assert resolve(model=family(name, tmp_path)).page_size == 16
