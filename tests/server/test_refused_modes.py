"""Modes that are not served together, or not with a setting, end the start in one line."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusing import refusal, resolve
from tiny_models import tiny_model

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.sglang.features.storage.setup import check_told_apart

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")


DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake_tcp")


def not_together(mode: str, got: str, expected: str) -> str:
    """The end of the line for a mode with its value, and what it does not go with."""
    flag, value = mode.split()
    return f" {flag} is {value}, which does not go with {got} yet; expected {expected}"


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_prefill_or_decode_server_of_one_rank_alone(mode: str) -> None:
    flag = ("--disaggregation-mode", mode)
    message = refusal(*DECODE, *flag, "--tp-size", "2")
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
def test_a_decode_server_that_cannot_be(config: dict[str, object], got: str, expected: str) -> None:
    message = refusal(*DECODE, config=config)
    assert message.endswith(not_together("--disaggregation-mode decode", got, expected))


LINKER = '{"linker": "Other", "linker_module_path": "other"}'


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--disable-radix-cache",), "--disable-radix-cache is given, but storage"),
        (("--unified-cache-external-linker-config", LINKER), "storage is set and --unified"),
    ],
)
def test_a_store_with_flags_that_contradict_it(flags: tuple[str, ...], words: str) -> None:
    assert words in refusal(*flags, config={"storage": {"path": "/somewhere"}})


STORED = {"storage": {"path": "/somewhere"}}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip


def test_a_store_of_what_its_keys_do_not_name(tmp_path: Path) -> None:
    hooks = '[{"name": "a", "target_modules": ["model.layers.*"], "hook_factory": "a:b"}]'
    message = refusal("--forward-hooks", hooks, config=STORED)
    assert "storage: got --forward-hooks, whose code may change K and V; expected no st" in message
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    config |= {"rope_parameters": LONGROPE, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "storage: got a model with longrope" in refusal(model=tmp_path, config=STORED)
    resolve(model=tmp_path, config={})
    server = SimpleNamespace(enable_unified_cache_external_linker=True, forward_hooks=None)
    text = SimpleNamespace(rope_parameters={"rope_type": "default"})
    for is_multimodal in (False, True):
        model = SimpleNamespace(hf_text_config=text, is_multimodal=is_multimodal)
        with pytest.raises(ConfigError) if is_multimodal else nullcontext():
            check_told_apart(server, model)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (("--enable-eplb",), "--enable-eplb true"),
        (
            ("--offload-group-size", "4", "--offload-mode", "sharded_gpu"),
            "--offload-mode sharded_gpu",
        ),
    ],
)
def test_a_store_whose_pages_could_be_of_other_weights(flags: tuple[str, ...], mode: str) -> None:
    """Experts move between ranks while a server serves, or its fingerprint lacks weights."""
    message = refusal(*flags, config={"storage": {"path": "/somewhere"}})
    assert message.endswith(not_together(mode, "storage", "no storage"))


def test_another_linker() -> None:
    assert "expected dynamic with" in refusal("--enable-unified-cache-external-linker")


NGRAM = ("--speculative-algorithm", "NGRAM")


def test_ngram_speculation_drafts_chains() -> None:
    """SGLang's default of trees would end its own start with these pages."""
    assert resolve(*NGRAM).speculative_ngram_max_bfs_breadth == 1
    assert resolve(*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")


STANDALONE = ("--speculative-algorithm", "STANDALONE")


def test_a_draft_model_drafts_chains() -> None:
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
def test_what_a_draft_model_does_not_go_with(flags: tuple[str, ...], message: str) -> None:
    draft = ("--speculative-draft-model-path", str(tiny_model("llama")))
    assert message in refusal(*STANDALONE, *draft, *flags)


def test_a_draft_model_has_a_folder() -> None:
    assert "without --speculative-draft-model-path; expected" in refusal(*STANDALONE)


@pytest.mark.parametrize(
    ("config", "got", "expected"),
    [
        ({"prefetch": True}, "prefetch", "no extension"),
        ({"tail_estimate": True}, "tail_estimate", "no extension"),
        ({"overlap": True}, "overlap: true", "overlap: false"),
        ({"storage": {"path": "/somewhere"}}, "storage", "no storage"),
    ],
)
def test_what_speculation_does_not_go_with(config: object, got: str, expected: str) -> None:
    message = refusal(*NGRAM, config=config)
    assert message.endswith(not_together(" ".join(NGRAM), got, expected))


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
    flag: str, config: dict[str, object], got: str, expected: str
) -> None:
    message = refusal("--tp-size", "2", flag, "2", config=config)
    assert message.endswith(not_together(f"{flag} 2", got, expected))


@pytest.mark.parametrize("flag", ["--pp-size", "--attn-dp-size", "--dp-size"])
def test_modes_that_are_not_served_together(flag: str) -> None:
    for mode in (NGRAM, DECODE[:2]):
        message = refusal(flag, "2", *DECODE[2:], *mode)
        assert message.endswith(not_together(" ".join(mode), f"{flag} 2", f"{flag} 1"))
    message = refusal(*NGRAM, *DECODE)
    expected = "no --speculative-algorithm"
    assert message.endswith(not_together(" ".join(DECODE[:2]), " ".join(NGRAM), expected))


def test_ranks_with_requests_of_their_own_capture_nothing() -> None:
    flags = ("--tp-size", "2", "--attn-dp-size", "2")
    message = refusal(*flags, config={"cuda_graph": True})
    expected = 'cuda_graph: "auto"'
    assert message.endswith(not_together("--attn-dp-size 2", "cuda_graph: true", expected))
    old = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    for line in (flags, old):
        assert HiSparseConfig.parse(resolve(*line).hisparse_config).cuda_graph is False


def test_replicas_get_the_bytes_that_were_free_before_the_first() -> None:
    """A fraction of what a replica finds would be less for each of them."""
    found = HiSparseConfig.parse(resolve("--dp-size", "2").hisparse_config).host_memory
    assert isinstance(found, int) and found > 2**20
    assert HiSparseConfig.parse(resolve().hisparse_config).host_memory == 0.7
