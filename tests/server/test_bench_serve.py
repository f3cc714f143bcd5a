"""`hisparse bench serve` on running servers: the same load on dense SGLang and on hisparse."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import Server
from tiny_models import VOCAB, with_tokenizer

from tests.command import Command

CONFIG = {"budget": 96, "host_memory": "1GiB", "device_memory": "64MB"}
LIMITS = ("--max-total-tokens", "4000", "--max-running-requests", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    draw = random.Random(0)
    file.write_text(" ".join(f"w{draw.randrange(2, VOCAB)}" for _ in range(3000)))
    return file


def test_dense_and_sparse_under_the_same_load(
    model: Path, text: Path, log_dir: Path, command: Command
) -> None:
    flags = ["--model", str(model), "--text", str(text), "--output", "6", "--requests", "4"]
    flags += ["--slo-ttft", "3600s", "--slo-tpot", "1us", "--shared-prefix", "0.5"]
    with (
        Server(model, log_dir / "load-dense.log", *LIMITS, backend="torch_native", tokenizer=True)
        as dense,
        Server(model, log_dir / "load-hisparse.log", *LIMITS, config=CONFIG, tokenizer=True)
        as sparse,
    ):  # fmt: skip
        both = [*flags, "--url", f"{dense.url},{sparse.url}", "--context", "64,300"]
        report = command.json("bench", "serve", *both, "--concurrency", "2")
        # Longer than its KV cache: refused, and counted.
        alone = ["--url", sparse.url, "--context", "4100", "--rate", "50", "--requests", "2"]
        refused = command.json("bench", "serve", *flags, *alone)
    short, long = report["cases"]
    assert (short["gate"], long["gate"]) == ("passed", "passed")
    for case in (short, long):
        for result in case["results"]:
            load = result["load"]
            assert (load["completed"], load["failed"]) == (4, 0)
            assert load["total_output_tokens"] == 4 * 6
            assert load["total_input_tokens"] == 4 * case["params"]["context"]
            assert 0 < load["median_ttft_ms"] <= load["p99_ttft_ms"]
            # An hour for the first token is met by all, a microsecond per token by none.
            assert load["request_goodput"] == 0
            assert result["memory"]["kv_tokens"] >= 3900
    ours = [case["results"][1] for case in (short, long)]
    assert list(short["throughput_ratios"]) == [f"{dense.url}/{sparse.url}"]
    # Within the budget the same distribution, beyond it another; what is dense moves nothing.
    assert ours[0]["quality"]["kl"] < 1e-4 < ours[1]["quality"]["kl"]
    assert ours[0]["quality"]["agreement"] == 1.0
    assert ours[1]["cache"]["hit_pages"] > 0
    assert report["cases"][1]["results"][0]["cache"] == {}
    (case,) = refused["cases"]
    assert case["gate"] == "not checked"
    assert case["ratios"] == case["throughput_ratios"] == {}
    (result,) = case["results"]
    assert (result["load"]["completed"], result["load"]["failed"]) == (0, 2)
    assert "refused" in case["params"]["failures"][sparse.url]
