"""``hisparse plan`` on requests within a time per token, on moving a prefix, and its plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from transformers import DeepseekV3Config, LlamaConfig, MiniMaxM2Config, PretrainedConfig

from hisparse.cli import main
from hisparse.cli.plan_trace import Traced
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.plan.estimate import estimate_step
from hisparse.plan.fit import Machine, fit
from hisparse.plan.hardware import Hardware
from hisparse.plan.tpot import loads_within
from hisparse.trace import SelectionTrace, lru_curve
from hisparse.transformers.model_config import shape_per_rank
from hisparse.units import parse_rate, parse_seconds
from tests.shapes import LLAMA

GIB = 2**30
H100 = Hardware.named("h100", "pcie5")
HUNDRED = Machine(
    device_bytes=80 * GIB, host_bytes=1024 * GIB, tp=1, weight_bytes=15 * GIB, mem_fraction=0.85
)


@pytest.mark.parametrize("slo_ms", [8, 12, 30, 300])
@pytest.mark.parametrize("context", [8192, 32768])
def test_one_more_request_takes_too_long_or_does_not_fit(context: int, slo_ms: float) -> None:
    capacity = fit(HiSparseConfig(), LLAMA, HUNDRED, context)
    found = loads_within(capacity, H100, limit_ms=slo_ms, rest_ms=5, hit_ratio=0.85)

    def token_ms(batch: int) -> tuple[float, float]:
        step = estimate_step(
            capacity.config, LLAMA, H100, context=context, batch=batch, hit_ratio=0.85
        )
        return 5 + step.dense_ms, 5 + step.hisparse_ms

    fits = capacity.dense_max_requests, capacity.max_requests
    for side, load in enumerate((found.dense, found.hisparse)):
        assert 0 < load.requests <= fits[side]
        assert load.token_ms == token_ms(load.requests)[side] <= slo_ms
        if load.limit == "memory":
            assert load.requests == fits[side]
        else:
            assert token_ms(load.requests + 1)[side] > slo_ms
        assert load.tokens_per_s == pytest.approx(1000 * load.requests / load.token_ms)
    if slo_ms == 300:
        assert found.hisparse.limit == "memory"


def test_no_request_is_in_time_or_fits() -> None:
    capacity = fit(HiSparseConfig(), LLAMA, HUNDRED, 32768)
    late = loads_within(capacity, H100, limit_ms=6, rest_ms=5, hit_ratio=0.5)
    assert late.hisparse.token_ms is not None
    assert (late.hisparse.requests, late.hisparse.limit) == (0, "time")
    assert late.hisparse.token_ms > 6, "the time of one request"
    small = fit(HiSparseConfig(), LLAMA, replace(HUNDRED, host_bytes=GIB), 32768)
    none = loads_within(small, H100, limit_ms=60, rest_ms=5, hit_ratio=0.5)
    assert (none.hisparse.requests, none.hisparse.limit) == (0, "memory")
    assert (none.hisparse.token_ms, none.hisparse.tokens_per_s) == (None, 0)


def llama(layers: int, kv_heads: int, heads: int = 64) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=heads * 128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


MINIMAX_M2 = MiniMaxM2Config(
    num_hidden_layers=62, num_attention_heads=48, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=131072, dtype="bfloat16",
)  # fmt: skip
DEEPSEEK_V3 = DeepseekV3Config(dtype="bfloat16", max_position_embeddings=131072)
#: Bytes of a token in published examples. DeepSeek-V3: 61 layers with latents of 512 and 64.
TOKENS: dict[str, tuple[PretrainedConfig, int]] = {
    "DeepSeek-V3": (DEEPSEEK_V3, 70_272),
    "Llama-3.1-70B": (llama(80, 8), 320 * 1024),
    "LLaMA-65B": (llama(80, 64), 2560 * 1024),
    "MiniMax-M2": (MINIMAX_M2, 248 * 1024),
}


@pytest.mark.parametrize(("model", "token_bytes"), TOKENS.values(), ids=TOKENS)
def test_bytes_of_a_token(model: PretrainedConfig, token_bytes: int) -> None:
    assert shape_per_rank(model, 16, 1).token_bytes == token_bytes


@pytest.mark.parametrize(
    ("model", "link", "seconds"),
    [
        # "64k tokens at 20 GB/s in 0.21 s and 0.76 s": 64,000 tokens, and GB for GiB.
        (DEEPSEEK_V3, "20GiB/s", 0.21),
        (MINIMAX_M2, "20GiB/s", 0.76),
        (DEEPSEEK_V3, "20GB/s", 0.22),
        (llama(80, 8), "20GB/s", 1.05),
        (llama(80, 8), "160Gb/s", 1.05),
        (llama(80, 8), "pcie5", 0.38),
    ],
)
def test_time_to_move_a_prefix(
    model: PretrainedConfig,
    link: str,
    seconds: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model.save_pretrained(tmp_path)
    line = ["--model", str(tmp_path), "--context", "64000", "--weights", "10GiB", "--link", link]
    (move,) = planned(capsys, *line, "--algorithm", "quest", device="141GiB")["moves"]
    assert move["link"] == link
    assert move["bytes"] == 64000 * shape_per_rank(model, 16, 1).token_bytes
    assert round(move["seconds"], 2) == seconds


@pytest.fixture
def folder(tmp_path: Path) -> str:
    llama(4, 2, heads=8).save_pretrained(tmp_path)
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *line: str, device: str = "1GiB") -> dict[str, Any]:
    memory = ["--device-memory", device, "--host-memory", "1TiB"]
    assert main(["plan", *line, *memory, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_requests_within_a_time_are_in_json_and_in_the_table(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--model", folder, "--context", "8192", "--hit-ratio", "0.5,1", "--weights", "300MB"]
    found = planned(capsys, *line, "--slo-tpot", "2ms", "--gpu", "h100,h200")
    at = [(load["gpu"], load["hit_ratio"]) for load in found["loads"]]
    assert at == [("h100", 0.5), ("h100", 1.0), ("h200", 0.5), ("h200", 1.0)]
    # 300 MB at 3,000 GB/s.
    assert found["loads"][0]["rest_ms"] == 0.1
    assert any("all weights" in line for line in found["estimate"]["assumptions"])
    given = planned(capsys, *line, "--slo-tpot", "2ms", "--rest", "1.9ms")
    assert given["loads"][0]["rest_ms"] == 1.9
    assert any("--rest" in line for line in given["estimate"]["assumptions"])
    few, many = (x["loads"][0]["hisparse"]["max_requests"] for x in (given, found))
    assert few < many
    memory = ["--device-memory", "1GiB", "--host-memory", "1TiB"]
    assert main(["plan", *line, *memory, "--slo-tpot", "2ms", "--link", "20GB/s"]) == 0
    out = capsys.readouterr().out
    assert "Estimated, not measured: requests within 2 ms per token, h100" in out
    assert f" {many} " in next(line for line in out.splitlines() if " 50% " in line)
    assert "Time to move K and V of a request, computed" in out
    assert planned(capsys, *line)["loads"] == planned(capsys, *line)["moves"] == []


def test_the_plot_has_a_line_for_each_configuration_over_several_contexts(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.svg"
    line = ["--model", folder, "--context", "16384", "--algorithm", "sketch,quest", "--plot"]
    found = planned(capsys, *line, str(file), device="8GiB")
    assert [row["context"] for row in found["plans"]] == [16384] * 2, "its contexts are its own"
    root = ElementTree.fromstring(file.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"sketch, budget 2,048", "quest, budget 2,048", "dense", "256", "16k"} & set(texts)
    assert "Planned, not measured: against tokens of context" in texts
    assert any("85% hits where not all" in str(text) for text in texts)
    # Two panels, two configurations, seven contexts, and two dots in the legend.
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 2 * 2 * 7 + 2
    planned(capsys, *line, str(file), "--slo-tpot", "20ms", device="8GiB")
    assert "Requests within 20 ms per token" in file.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slo-tpot", "30"], "--slo-tpot: got '30', expected a time above 0 such as '30ms'"),
        (["--slo-tpot", "0ms"], "--slo-tpot: got '0ms'"),
        (["--rest", "5ms"], "--rest: got 5ms without --slo-tpot"),
        (["--slo-tpot", "1s", "--rest=-1s"], "--rest: got '-1s', expected a time"),
        (["--slo-tpot", "1s", "--rest", "5ms", "--gpu", "h100,h200"], "expected one --gpu"),
        (["--link", "nvlink"], "--link (a rate, or pcie5, c2c): got 'nvlink', expected a rate"),
        (["--link", "0GB/s"], "expected a rate above 0"),
        (["--link", "20GB"], "such as '20GB/s'"),
        (["--plot", "plan.png"], "--plot: got 'plan.png', expected a name that ends with .svg"),
        (["--plot", "no/such/folder/plan.svg"], "No such file or directory"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], words: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ["--device-memory", "1GiB", "--host-memory", "1TiB", "--context", "4096"]
    assert main(["plan", "--model", folder, *memory, *flags]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words in err


def test_times_and_rates() -> None:
    assert [parse_seconds("x", text) for text in ("30ms", "1.5 s", "500us")] == [0.03, 1.5, 0.0005]
    rates = {"20GB/s": 2e10, "20GiB/s": 20 * 2**30, "400Gb/s": 5e10, "8 kbit/s": 1000, "3B/s": 3}
    assert {text: parse_rate("x", text) for text in rates} == rates
    for text in ("20gb/s", "20iB/s", "1e3MB/s", "٣GB/s", "9" * 50 + "B/s"):
        with pytest.raises(ConfigError, match="x: got"):
            parse_rate("x", text)


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = str(tmp_path / "selections.trace")
    line = ["--context", "8192", "--budget", "2048", "--overlap", "0.6", "--steps", "40"]
    assert main(["trace", "record", "--synthetic", *line, "--out", path]) == 0
    capsys.readouterr()
    return path


def test_a_trace_gives_the_hit_ratio_of_the_buffer(
    trace: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--model", folder, "--context", "8192", "--slo-tpot", "5ms"]
    configs = [f'{{"algorithm": "quest", "device_buffer_size": {n}}}' for n in (2048, 4096)]
    line += ["--trace", trace, "--config", configs[0], "--config", configs[1]]
    found = planned(capsys, *line)
    with SelectionTrace(Path(trace)) as opened:
        curve = lru_curve(opened)
    expected = [curve.hit_ratio(tokens) for tokens in (2048, 4096)]
    assert 0.4 < expected[0] < expected[1] < 1
    for row, hits in zip(found["plans"], expected, strict=True):
        assert {step["hit_ratio"] for step in row["estimates"]} == {hits}
        assert {load["hit_ratio"] for load in row["loads"]} == {hits}
    assert found["estimate"]["trace"]["source"] == "made up"
    many, few = (row["estimates"][0]["bytes_per_layer"]["misses"] for row in found["plans"])
    assert many > few > 0
    memory = ["--device-memory", "1GiB", "--host-memory", "1TiB"]
    plot = f"{trace}.svg"
    assert main(["plan", *line, *memory, "--plot", plot]) == 0
    assert "MADE UP, by no model" in " ".join(capsys.readouterr().out.split())
    assert "MADE-UP trace" in Path(plot).read_text()


def test_rows_with_contexts_beyond_the_trace_are_marked(
    trace: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace has contexts of up to 8,232 tokens."""
    line = ["--model", folder, "--context", "8192,16384", "--trace", trace, "--slo-tpot", "5ms"]
    found = planned(capsys, *line)
    assert [row["beyond_trace"] for row in found["plans"]] == [False, True]
    memory = ["--device-memory", "1GiB", "--host-memory", "1TiB"]
    assert main(["plan", *line, *memory]) == 0
    out = capsys.readouterr().out
    ratio = f"{found['plans'][1]['estimates'][0]['hit_ratio']:.0%}"
    assert f"{ratio}?" in out
    assert "?: 16,384 tokens of context are more than any in the trace" in " ".join(out.split())
    assert main(["plan", *line[:3], "8192", *line[4:], *memory]) == 0
    assert "?" not in capsys.readouterr().out


@pytest.mark.parametrize("other", [{"algorithm": "quest"}, {"budget": 1024}, {"page_size": 32}])
def test_a_recorded_trace_is_of_one_configuration(trace: str, other: dict[str, Any]) -> None:
    with SelectionTrace(Path(trace)) as opened:
        curve = lru_curve(opened)
    about = {"file": "a.trace", "source": "recorded"}
    about |= {"algorithm": "sketch", "budget": 2048, "page_size": 16}
    traced = Traced(curve=curve, about=about)
    assert traced.hit_ratio(HiSparseConfig()) == curve.hit_ratio(4096)
    (name,) = other
    with pytest.raises(ConfigError, match=f"a.trace' of {name} .*; expected the same"):
        traced.hit_ratio(HiSparseConfig(**{"device_buffer_size": 4096} | other))


def test_a_trace_of_something_else_is_one_line(
    trace: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.trace"
    damaged.write_bytes(Path(trace).read_bytes()[:-40] + b"x" * 40)
    memory = ["--device-memory", "1GiB", "--host-memory", "1TiB", "--context", "8192"]
    for flags, words in (
        (["--trace", trace, "--hit-ratio", "0.5"], "and --hit-ratio, expected one of them"),
        (["--trace", trace, "--config", '{"page_size": 32}'], "of page_size 16, but a row of the"),
        (["--trace", trace, "--budget", "256"], "expected at least the"),
        (["--trace", str(damaged)], "expected a trace that hisparse recorded"),
        (["--trace", str(tmp_path / "none")], "cannot be read: No such file"),
    ):
        assert main(["plan", "--model", folder, *memory, *flags]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1), flags
        assert words in err
