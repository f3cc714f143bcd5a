"""What cannot be served ends the start in one line, before the model loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import run_to_exit
from tiny_models import INDEX_TOP_K, tiny_model

from hisparse.config import HiSparseConfig
from hisparse.sglang.combinations import Start, check_combinations
from hisparse.sglang.server_args import prepare_before_resolution
from scripts.model_families import FAMILIES

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

Resolve = Callable[..., object]


@pytest.fixture(scope="module")
def resolve() -> Resolve:
    """Parses a command line and resolves it as the server does, in this process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    def run(*flags: str, model: Path | None = None, config: object = None) -> object:
        line = ["--model-path", str(model or tiny_model("llama")), "--device", "cpu"]
        line += ["--dtype", "float32", "--attention-backend", "hisparse"]
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            line += ["--hisparse-config", text]
        args = prepare_server_args([*line, *flags])
        args.resolve_once()
        return args

    return run


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")


def refusal(resolve: Resolve, *flags: str, **options: object) -> str:
    """The one line that the start ends with."""
    with pytest.raises(SystemExit) as end:
        resolve(*flags, **options)
    message = str(end.value.code)
    assert message.startswith("hisparse: error: ")
    assert "\n" not in message
    return message


def test_kernels_are_built_before_the_model_loads(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that says it is ready has nothing left to compile."""
    built = list[str]()
    monkeypatch.setattr("hisparse.kernels.build.ahead.cpu_library", lambda: built.append("cpu"))
    resolve()
    assert built == ["cpu"]


def test_what_can_be_served_is_not_refused(resolve: Resolve) -> None:
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
def test_a_configuration_that_cannot_be_used(
    resolve: Resolve, config: object, message: str
) -> None:
    assert message in refusal(resolve, config=config)


def test_an_error_in_a_file_names_the_file(resolve: Resolve, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{")
    assert str(path) in refusal(resolve, config=f"@{path}")


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


DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake_tcp")


def not_together(mode: str, got: str, expected: str) -> str:
    """The end of the line for a mode with its value, and what it does not go with."""
    flag, value = mode.split()
    return f" {flag} is {value}, which does not go with {got} yet; expected {expected}"


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_prefill_or_decode_server_of_one_rank_alone(resolve: Resolve, mode: str) -> None:
    flag = ("--disaggregation-mode", mode)
    message = refusal(resolve, *DECODE, *flag, "--tp-size", "2")
    assert message.endswith(not_together(" ".join(flag), "--tp-size 2", "--tp-size 1"))


@pytest.mark.parametrize(
    ("config", "got", "expected"),
    [
        (
            {"host_layout": "page_first"},
            "host_layout: page_first",
            "host_layout: layer_first",
        ),
        ({"storage": {"path": "/somewhere"}}, "storage", "no storage"),
        (
            {"algorithm": "snapkv"},
            "algorithm snapkv, which needs queries of a prompt's last 32 tokens",
            "an algorithm that needs K alone: sketch, quest",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_decode_server_that_cannot_be(
    resolve: Resolve, config: dict[str, object], got: str, expected: str
) -> None:
    message = refusal(resolve, *DECODE, config=config)
    assert message.endswith(not_together("--disaggregation-mode decode", got, expected))


LINKER = '{"linker": "Other", "linker_module_path": "other"}'


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--disable-radix-cache",), "--disable-radix-cache is given, but storage"),
        (("--unified-cache-external-linker-config", LINKER), "storage is set and --unified"),
    ],
)
def test_a_store_with_flags_that_contradict_it(
    resolve: Resolve, flags: tuple[str, ...], words: str
) -> None:
    assert words in refusal(resolve, *flags, config={"storage": {"path": "/somewhere"}})


def test_another_linker(resolve: Resolve) -> None:
    assert "expected dynamic with" in refusal(resolve, "--enable-unified-cache-external-linker")


NGRAM = ("--speculative-algorithm", "NGRAM")


def test_ngram_speculation_drafts_chains(resolve: Resolve) -> None:
    """SGLang's default of trees would end its own start with these pages."""
    assert resolve(*NGRAM).speculative_ngram_max_bfs_breadth == 1
    assert resolve(*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")


STANDALONE = ("--speculative-algorithm", "STANDALONE")


def test_a_draft_model_drafts_chains(resolve: Resolve) -> None:
    """SGLang's default for a Llama is a tree, and its draft models attend on a GPU alone."""
    draft = (*STANDALONE, "--speculative-draft-model-path", str(tiny_model("llama")))
    view = resolve(*draft)
    assert (view.speculative_num_steps, view.speculative_eagle_topk) == (3, 1)
    assert resolve(*draft, "--speculative-num-draft-tokens", "8").speculative_num_steps == 7
    view = resolve(*draft, "--speculative-num-steps", "5", "--speculative-num-draft-tokens", "9")
    assert (view.speculative_num_draft_tokens, view.speculative_eagle_topk) == (6, 1)
    assert view.speculative_draft_attention_backend == "hisparse_draft"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speculative-eagle-topk", "2"), "--speculative-eagle-topk is 2; expected 1"),
        (
            ("--speculative-draft-attention-backend", "triton"),
            "--speculative-draft-attention-backend is triton; expected it unset",
        ),
        (("--enable-multi-layer-eagle",), "does not go with --enable-multi-layer-eagle yet"),
        (("--enable-mixed-chunk",), "does not go with --enable-mixed-chunk yet"),
        (
            ("--speculative-draft-kv-cache-dtype", "fp8_e4m3"),
            "does not go with --speculative-draft-kv-cache-dtype fp8_e4m3 yet",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_a_draft_model_does_not_go_with(
    resolve: Resolve, flags: tuple[str, ...], message: str
) -> None:
    draft = ("--speculative-draft-model-path", str(tiny_model("llama")))
    assert message in refusal(resolve, *STANDALONE, *draft, *flags)


def test_a_draft_model_has_a_folder(resolve: Resolve) -> None:
    assert "without --speculative-draft-model-path; expected" in refusal(resolve, *STANDALONE)


@pytest.mark.parametrize(
    ("config", "got", "expected"),
    [
        ({"prefetch": True}, "prefetch", "no extension"),
        ({"tail_estimate": True}, "tail_estimate", "no extension"),
        ({"overlap": True}, "overlap: true", "overlap: false"),
        ({"storage": {"path": "/somewhere"}}, "storage", "no storage"),
    ],
)
def test_what_speculation_does_not_go_with(
    resolve: Resolve, config: object, got: str, expected: str
) -> None:
    message = refusal(resolve, *NGRAM, config=config)
    assert message.endswith(not_together(" ".join(NGRAM), got, expected))


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_feature_that_is_not_built(resolve: Resolve, flags: tuple[str, ...]) -> None:
    assert flags[-2 if len(flags) > 1 else 0] in refusal(resolve, *flags)


@pytest.mark.parametrize(
    ("flag", "config", "got", "expected"),
    [
        ("--pp-size", {"storage": {"path": "/somewhere"}}, "storage", "no storage"),
        ("--pp-size", {"trace": "/somewhere"}, "trace", "no extension that needs all layers"),
        ("--pp-size", {"reuse_layers": 2}, "reuse_layers: 2", "reuse_layers: 1"),
        ("--attn-dp-size", {"storage": {"path": "/somewhere"}}, "storage", "no storage"),
    ],
)
def test_settings_that_ranks_cannot_have(
    resolve: Resolve, flag: str, config: dict[str, object], got: str, expected: str
) -> None:
    message = refusal(resolve, "--tp-size", "2", flag, "2", config=config)
    assert message.endswith(not_together(f"{flag} 2", got, expected))


@pytest.mark.parametrize("flag", ["--pp-size", "--attn-dp-size", "--dp-size"])
def test_modes_that_are_not_served_together(resolve: Resolve, flag: str) -> None:
    for mode in (NGRAM, DECODE[:2]):
        message = refusal(resolve, flag, "2", *DECODE[2:], *mode)
        assert message.endswith(not_together(" ".join(mode), f"{flag} 2", f"{flag} 1"))
    message = refusal(resolve, *NGRAM, *DECODE)
    expected = "no --speculative-algorithm"
    assert message.endswith(not_together(" ".join(DECODE[:2]), " ".join(NGRAM), expected))


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (NGRAM, "--speculative-algorithm NGRAM"),
        (DECODE, "--disaggregation-mode decode"),
        (("--dp-size", "2", "--enable-dp-attention"), "--attn-dp-size 2"),
        (("--dp-size", "2"), "--dp-size 2"),
        (("--pp-size", "2"), "--pp-size 2"),
    ],
)
def test_modes_that_an_older_sglang_does_not_serve(
    resolve: Resolve, flags: tuple[str, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_combinations

    def older(start: Start) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("hisparse.sglang.compat.installed", lambda: "0.5.22")
            check(start)

    monkeypatch.setattr("hisparse.sglang.server_args.check_combinations", older)
    message = refusal(resolve, *flags)
    assert f" {mode} needs sglang 0.5.23 or newer, got 0.5.22; expected " in message


def test_ranks_with_requests_of_their_own_capture_nothing(resolve: Resolve) -> None:
    flags = ("--tp-size", "2", "--attn-dp-size", "2")
    message = refusal(resolve, *flags, config={"cuda_graph": True})
    expected = 'cuda_graph: "auto"'
    assert message.endswith(not_together("--attn-dp-size 2", "cuda_graph: true", expected))
    old = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    for line in (flags, old):
        assert HiSparseConfig.parse(resolve(*line).hisparse_config).cuda_graph is False


def test_replicas_get_the_bytes_that_were_free_before_the_first(resolve: Resolve) -> None:
    """A fraction of what a replica finds would be less for each of them."""
    found = HiSparseConfig.parse(resolve("--dp-size", "2").hisparse_config).host_memory
    assert isinstance(found, int) and found > 2**20
    assert HiSparseConfig.parse(resolve().hisparse_config).host_memory == 0.7


FP8 = ("--kv-cache-dtype", "fp8_e4m3")


def test_fp8_by_the_flag_or_by_the_key(resolve: Resolve) -> None:
    config = {"kv_cache_dtype": "fp8_e4m3", "budget": 512, "dense_layers": [1]}
    key, both = (
        HiSparseConfig.parse(resolve(*x, config=config).hisparse_config) for x in ((), FP8)
    )
    assert key == both == HiSparseConfig.from_dict(config)
    flag = HiSparseConfig.parse(resolve(*FP8).hisparse_config)
    assert flag == HiSparseConfig(kv_cache_dtype="fp8_e4m3")
    assert "or fp8_e4m3" in refusal(resolve, "--kv-cache-dtype", "fp8_e5m2")


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
def test_fp8_that_cannot_be(
    resolve: Resolve, flags: tuple[str, ...], config: object, message: str
) -> None:
    assert message in refusal(resolve, *flags, config=config)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_hisparse_for_one_phase_only(resolve: Resolve, phase: str) -> None:
    message = refusal(resolve, f"--{phase}-attention-backend", "torch_native")
    assert f"{phase} " in message and "torch_native" in message


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graphs_by_a_flag_of_sglang_alone(resolve: Resolve, phase: str) -> None:
    message = refusal(resolve, f"--cuda-graph-backend-{phase}", "full")
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
def test_a_gpu_captures_decode_steps_where_it_can(config: object, captured: bool) -> None:
    from sglang.srt.server_args import prepare_server_args

    line = ["--model-path", str(tiny_model("llama")), "--attention-backend", "hisparse"]
    args = prepare_server_args([*line, "--device", "cuda", "--hisparse-config", json.dumps(config)])
    prepare_before_resolution(args)
    assert args.disable_cuda_graph is not captured
    assert args.disable_prefill_cuda_graph is captured


def test_a_cpu_captures_nothing(resolve: Resolve) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    graphs = resolved_view(resolve()).cuda_graph_config
    assert graphs.decode.backend == graphs.prefill.backend == "disabled"


@pytest.mark.parametrize("page_size", ["1", "8", "24"])
def test_a_page_that_does_not_divide_that_of_sglang(resolve: Resolve, page_size: str) -> None:
    message = refusal(resolve, "--page-size", page_size)
    assert f"page_size is 16 but --page-size is {page_size}" in message


def test_pages_of_one_token(resolve: Resolve) -> None:
    """With them SGLang serves beam search, which would take a row's history from under it."""
    message = refusal(resolve, "--page-size", "1", config={"page_size": 1})
    assert "--page-size is 1; expected 2 or more" in message


@pytest.mark.parametrize("name", ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "SGLANG_USE_HND_KVCACHE"])
def test_an_environment_variable_that_changes_the_pool(
    resolve: Resolve, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert name in refusal(resolve)


def test_heads_that_share_a_latent_cannot_select_apart(resolve: Resolve) -> None:
    config = {"selection_scope": "query_head"}
    message = refusal(resolve, model=tiny_model("deepseek_v2"), config=config)
    assert "'query_head' does not go with" in message
    assert "latent attention (MLA) (choices: kv_head, layer; algorithms that can: none)" in message


def test_a_model_with_an_indexer_is_served_by_what_asks_it(
    resolve: Resolve, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("deepseek_v32")
    message = refusal(resolve, model=model)
    assert "DeepseekV32ForCausalLM was trained to attend what its indexer selects" in message
    assert message.endswith("expected one that does: dsa")
    config = {"algorithm": "dsa", "page_size": 1, "budget": 2 * INDEX_TOP_K}
    assert resolve(model=model, config=config).page_size % 16 == 0
    warned = "are (128, 1, 2); DeepseekV32ForCausalLM was trained with (64, 0, 0)"
    assert warned in capfd.readouterr().err
    message = refusal(resolve, config=config)
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
    resolve: Resolve, tmp_path: Path, change: dict[str, object]
) -> None:
    """SGLang's Mistral and Qwen2 do not read it. The layers of a loaded model say what they do."""
    config = json.loads((tiny_model("llama") / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolved = resolve(model=tmp_path, config={})
    assert resolved.disable_hybrid_swa_memory


def _family(name: str, folder: Path) -> Path:
    return next(family for family in FAMILIES if family.name == name).write(folder)


HYBRIDS = ("Qwen3-Next", "Kimi Linear", "LFM2", "Falcon H1", "Granite 4 hybrid")


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_starts_without_a_radix_cache(resolve: Resolve, name: str, tmp_path: Path) -> None:
    """SGLang keeps the states of its layers there on a GPU alone, or in pages of one token."""
    model = _family(name, tmp_path)
    message = refusal(resolve, model=model)
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
    resolve: Resolve, flags: tuple[str, ...], tmp_path: Path
) -> None:
    model = _family("LFM2", tmp_path)
    message = refusal(resolve, "--disable-radix-cache", *flags, model=model)
    assert " and Lfm2ForCausalLM has layers of linear attention, convolution or a" in message
    assert message.endswith("which hisparse does not support together yet; expected the flag unset")


def test_a_hybrid_with_a_store(resolve: Resolve, tmp_path: Path) -> None:
    """A store would keep K and V of a prefix without the states of the other layers."""
    config = {"storage": {"path": "/somewhere"}}
    message = refusal(resolve, model=_family("Qwen3-Next", tmp_path), config=config)
    assert "(storage) is True, and Qwen3NextForCausalLM has layers" in message


def test_a_model_without_attention(resolve: Resolve, tmp_path: Path) -> None:
    message = refusal(resolve, model=_family("Mamba", tmp_path))
    assert message.endswith(
        "MambaForCausalLM has no layer that attends; expected attention in some layers"
    )


@pytest.mark.parametrize("name", ["gpt-oss", "EXAONE 4"])
def test_sglang_does_not_refuse_a_model_by_the_name_of_the_backend(
    resolve: Resolve, name: str, tmp_path: Path
) -> None:
    """What can be served is for hisparse to say; SGLang would end with an AssertionError."""
    end = "hisparse: error: "
    try:
        resolve(model=_family(name, tmp_path))
    except SystemExit as error:
        end = str(error.code)
    assert end.startswith("hisparse: error: ")


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
    resolve: Resolve, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((tiny_model("llama") / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"LlamaForCausalLM has layers with {words}; " in refusal(resolve, model=tmp_path)


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
