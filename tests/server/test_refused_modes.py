"""Modes that are not served together, or not with a setting, end the start in one line."""

from __future__ import annotations

import pytest
from refusing import refusal, resolve
from tiny_models import tiny_model

from hisparse.config import HiSparseConfig

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
