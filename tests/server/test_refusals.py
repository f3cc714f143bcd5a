"""What cannot be served ends the start in one line, before the model loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import run_to_exit
from refusing import refusal, resolve
from tiny_models import tiny_model

from hisparse.config import HiSparseConfig
from hisparse.sglang.features import IN_USE
from hisparse.sglang.server_args import prepare_before_resolution

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_kernels_are_built_before_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says it is ready has nothing left to compile."""
    built = list[str]()
    monkeypatch.setattr("hisparse.kernels.build.ahead.cpu_library", lambda: built.append("cpu"))
    resolve()
    assert built == ["cpu"]


def test_what_can_be_served_is_not_refused() -> None:
    resolve()
    resolve("--page-size", "64", config={"top_k": 512})
    resolve("--chunked-prefill-size", "256", "--kv-cache-dtype", "auto")
    assert resolve(config={"page_size": 32}).page_size == 32
    assert resolve(config={"page_size": 1}).page_size == 16


CONFIGS = {
    "unknown key": ({"budgt": 512}, "unknown config key 'budgt'; did you mean 'budget'?"),
    "wrong type": ({"budget": "512"}, "budget: got '512' (str), expected int"),
    "bool is no number": ({"budget": True}, "budget: got True (bool), expected int"),
    "alias beside its key": ({"budget": 512, "top_k": 512}, "got both budget and its alias top_k"),
    "key of upstream": ({"host_to_device_ratio": 2}, "host_memory takes its place"),
    "old key of upstream": ({"min_sparse_prompt_len": 2}, "min_sparse_context takes its place"),
    "budget beyond the buffer": (
        {"budget": 1024, "device_buffer_size": 512},
        "device_buffer_size: got 512, expected at least budget (1024)",
    ),
    "not whole pages": ({"budget": 1000}, "budget: got 1000, expected a multiple of page_size"),
    "buffer not whole pages": ({"device_buffer_size": 4100}, "expected a multiple of page_size"),
    "unknown algorithm": ({"algorithm": "qest"}, "unknown algorithm 'qest'; did you mean 'quest'?"),
    "unknown option": ({"algorithm_config": {"beta": 1}}, "unknown sketch option 'beta'"),
    "more memory than there is": ({"host_memory": "900TiB"}, "host_memory: got '900TiB'"),
    "fraction beyond one": ({"host_memory": 1.5}, "expected a fraction in (0, 1)"),
    "graphs of checked steps": ({"cuda_graph": True, "checked": True}, "got true and checked true"),
    "graphs of another name": ({"cuda_graph": "on"}, 'expected "auto" or true or false'),
    "graphs without a GPU": ({"cuda_graph": True}, "the device is cpu; expected cuda"),
    "a replaced key": ({"speculate": "step"}, 'prefetch takes its place: "prefetch": true'),
    "not JSON": ("{budget: 1}", "not JSON at line 1 column 2"),
    "not an object": ("[1]", "expected an object"),
    "no such file": ("@/no/such/file.json", "cannot read '/no/such/file.json'"),
}


@pytest.mark.parametrize("config, message", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_cannot_be_used(config: object, message: str) -> None:
    assert message in refusal(config=config)


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{")
    assert str(path) in refusal(config=f"@{path}")


FLAGS = {
    "trees of a draft model": ("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4"),
    "drafts of blocks": ("--speculative-algorithm", "DFLASH"),
    "HiCache": ("--enable-hierarchical-cache",),
    "LMCache": ("--enable-lmcache",),
    "SGLang's own HiSparse": ("--enable-hisparse",),
    "transfers by NIXL": ("--disaggregation-transfer-backend", "nixl"),
    "a pool for retracted requests": ("--disaggregation-decode-retraction-backup", "host_pool"),
    "transfers into HiCache": ("--disaggregation-decode-host-receive-threshold", "0.5"),
    "checksums of transfers": ("--disaggregation-enable-kv-checksum",),
    "roles that change": ("--enable-pd-role-switch",),
    "context parallelism": ("--tp-size", "2", "--attn-cp-size", "2"),
    "decode context parallelism": ("--tp-size", "2", "--dcp-size", "2"),
    "streaming sessions": ("--enable-streaming-session",),
    "KV of another dtype": ("--kv-cache-dtype", "bfloat16"),
    "memory saver": ("--enable-memory-saver",),
    "fp8 KV with two bits of fraction": ("--kv-cache-dtype", "fp8_e5m2"),
    "KV sharding": ("--enable-kv-cache-sharding",),
    "unified memory": ("--enable-unified-memory",),
    "page-major layout": ("--enable-page-major-kv-layout",),
    "no KV cache": ("--prefill-only-disable-kv-cache",),
    "two batches at a time": ("--enable-two-batch-overlap",),
    "PD multiplexing": ("--enable-pdmux",),
    "deterministic inference": ("--enable-deterministic-inference",),
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_feature_that_is_not_built(flags: tuple[str, ...]) -> None:
    assert flags[-2 if len(flags) > 1 else 0] in refusal(*flags)


FP8 = ("--kv-cache-dtype", "fp8_e4m3")


def test_fp8_by_the_flag_or_by_the_key() -> None:
    config = {"kv_cache_dtype": "fp8_e4m3", "budget": 512, "dense_layers": [1]}
    key, both = (
        HiSparseConfig.parse(resolve(*x, config=config).hisparse_config) for x in ((), FP8)
    )
    assert key == both == HiSparseConfig.from_dict(config)
    flag = HiSparseConfig.parse(resolve(*FP8).hisparse_config)
    assert flag == HiSparseConfig(kv_cache_dtype="fp8_e4m3")
    assert "or fp8_e4m3" in refusal("--kv-cache-dtype", "fp8_e5m2")


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        pytest.param(
            FP8,
            {"algorithm": "dipr"},
            "algorithm 'dipr' cannot do kv_cache_dtype fp8_e4m3; algorithms that can: ",
            id="keys-read-in-host-memory",
        ),
        pytest.param(
            ("--kv-cache-dtype", "bf16"),
            {"kv_cache_dtype": "fp8_e4m3"},
            "kv_cache_dtype is fp8_e4m3 but --kv-cache-dtype is bf16",
            id="flag-and-key",
        ),
        pytest.param((), {"kv_cache_dtype": "fp8_e5m2"}, 'expected "auto" or "fp8_e4m3"', id="key"),
    ],
)
def test_fp8_that_cannot_be(flags: tuple[str, ...], config: object, message: str) -> None:
    assert message in refusal(*flags, config=config)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_hisparse_for_one_phase_only(phase: str) -> None:
    message = refusal(f"--{phase}-attention-backend", "torch_native")
    assert f"{phase} " in message and "torch_native" in message


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graphs_by_a_flag_of_sglang_alone(phase: str) -> None:
    message = refusal(f"--cuda-graph-backend-{phase}", "full")
    assert f"--cuda-graph-backend-{phase} is full; expected disabled" in message


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
    config: object, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.server_args import prepare_server_args

    line = ["--model-path", str(tiny_model("llama")), "--attention-backend", "hisparse"]
    args = prepare_server_args([*line, "--device", "cuda", "--hisparse-config", json.dumps(config)])
    monkeypatch.setenv(IN_USE, "")
    prepare_before_resolution(args)
    assert args.disable_cuda_graph is not captured
    assert args.disable_prefill_cuda_graph is captured


def test_a_cpu_captures_nothing() -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    graphs = resolved_view(resolve()).cuda_graph_config
    assert graphs.decode.backend == graphs.prefill.backend == "disabled"


@pytest.mark.parametrize("page_size", ["1", "8", "24"])
def test_a_page_that_does_not_divide_that_of_sglang(page_size: str) -> None:
    message = refusal("--page-size", page_size)
    assert f"page_size is 16 but --page-size is {page_size}" in message


def test_pages_of_one_token() -> None:
    """With them SGLang serves beam search, which would take a row's history from under it."""
    message = refusal("--page-size", "1", config={"page_size": 1})
    assert "--page-size is 1; expected 2 or more" in message


@pytest.mark.parametrize("name", ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_USE_HND_KVCACHE"])
def test_an_environment_variable_that_changes_the_pool(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert name in refusal()


STARTS = {
    "unknown key": ((), {"budgt": 512}, "unknown config key 'budgt'; did you mean 'budget'?"),
    "memory saver": (("--enable-memory-saver",), {"budget": 512}, "--enable-memory-saver"),
    "host memory": ((), {"host_memory": "900TiB"}, "host_memory: got '900TiB'"),
}


def _end_of_start(
    *flags: str, model: Path, config: object, folder: Path, forked: bool = True
) -> str:
    """The last line that a start prints which is refused."""
    code, out, err = run_to_exit(model, *flags, config=config, folder=folder, forked=forked)
    assert code != 0
    assert "Load weight begin" not in out + err, "the model was loaded before the refusal"
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if "hisparse: error: " in line]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("flags, config, message", STARTS.values(), ids=STARTS)
def test_the_command_line_ends_with_one_line(
    flags: tuple[str, ...], config: object, message: str, tmp_path: Path
) -> None:
    """One of them really from the command line."""
    forked = "budgt" not in config
    model = tiny_model("llama")
    line = _end_of_start(*flags, model=model, config=config, folder=tmp_path, forked=forked)
    assert line.startswith("hisparse: error: ") and message in line


def test_the_command_line_refuses_a_model(tmp_path: Path) -> None:
    line = _end_of_start(model=tiny_model("deepseek_v32"), config=None, folder=tmp_path)
    assert "was trained to attend what its indexer selects" in line


@pytest.mark.parametrize(
    "config, term",
    [
        ({"host_memory": "1MB", "budget": 1024}, "host_memory: got"),
        ({"host_memory": "1GB", "device_memory": "1MB", "budget": 1024}, "device_memory: got"),
    ],
    ids=["host", "device"],
)
def test_too_little_memory_for_one_request_names_the_term(
    config: object, term: str, tmp_path: Path
) -> None:
    """Known only when the model's shape is: the message stands in the log, once."""
    code, out, err = run_to_exit(tiny_model("llama"), config=config, folder=tmp_path)
    assert code != 0
    lines = [line for line in (out + err).splitlines() if "hisparse: error: " in line]
    assert len(lines) == 1
    assert term in lines[0] and "one request" in lines[0]
