"""``hisparse trace recommend --tpot`` estimates as ``plan`` does; ``record``'s flags win."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli import main
from hisparse.config import HiSparseConfig
from hisparse.plan.estimate import estimate_step
from hisparse.plan.hardware import Hardware
from hisparse.trace import SelectionTrace, lru_curve
from hisparse.transformers.model_config import read_model_config, shape_per_rank
from tests.transformers.hf_models import model

CONTEXT, REST_MS = 2000, 1.0


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """A trace, and a model's configuration."""
    path, folder = str(tmp_path / "a.trace"), tmp_path / "model"
    sizes = ["--context", str(CONTEXT), "--budget", "256", "--steps", "40"]
    assert main(["trace", "record", "--synthetic", *sizes, "--out", path]) == 0
    model("llama").config.save_pretrained(folder)
    capsys.readouterr()
    return path, str(folder)


def test_the_buffer_is_the_smallest_in_time(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the formula of ``plan``; with one page less a step takes longer."""
    path, folder = files
    spec = shape_per_rank(read_model_config(folder), 16, 1)
    hardware = Hardware.named("h100", "pcie5")
    with SelectionTrace(Path(path)) as trace:
        curve = lru_curve(trace)
        longest = int(trace.visits.seq_lens.max())

    def token_ms(tokens: int) -> float:
        config = HiSparseConfig.from_dict({"budget": 256, "device_buffer_size": tokens})
        hits = curve.hit_ratio(tokens)
        step = estimate_step(config, spec, hardware, context=longest, batch=512, hit_ratio=hits)
        return REST_MS + step.hisparse_ms

    wanted = (token_ms(256) + token_ms(2000)) / 2
    line = ["trace", "recommend", path, "--tpot", f"{wanted:.6f}ms", "--model", folder]
    line += ["--batch", "512", "--rest", f"{REST_MS}ms"]
    assert main([*line, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    size, estimate = found["device_buffer_size"], found["estimate"]
    assert 256 < size < 2000
    assert token_ms(size) <= wanted < token_ms(size - 16)
    assert estimate["ms_per_token"] == token_ms(size)
    assert found["hit_ratio"] == curve.hit_ratio(size)
    assert estimate["measured"] is False
    assert main(line) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f'"device_buffer_size": {size} gives' in said
    assert "Estimated, not measured" in said
    assert "more than any in the trace" not in said
    assert main([*line, "--context", "2100"]) == 0
    assert "more than any in the trace" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tpot", "30", "--model", "MODEL"], "--tpot: got '30', expected a time"),
        (["--tpot", "1us", "--model", "MODEL"], "--tpot: got 0.001ms, expected at least"),
        (["--tpot", "30ms"], "--tpot: got 30ms without --model"),
        (["--tpot", "30ms", "--hit-ratio", "0.9"], "--tpot: got 30ms and --hit-ratio"),
        (["--gpu", "h100"], "--gpu: expected --tpot with it"),
        (["--tpot", "30ms", "--model", "MODEL", "--gpu", "x"], "--gpu: got 'x', expected"),
        (["--tpot", "30ms", "--model", "MODEL", "--rest", "x"], "--rest: got 'x', expected"),
        (["--tpot", "30ms", "--model", "nothing"], "unknown model 'nothing'"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str],
    message: str,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [files[1] if word == "MODEL" else word for word in words]
    assert main(["trace", "recommend", files[0], *given]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    assert message in said.err


def test_flags_win_over_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``record --budget`` and ``--algorithm``; without them the configuration holds."""
    from hisparse.cli import trace_record

    class Built(Exception):
        pass

    def build(config: HiSparseConfig) -> Any:
        raise Built(config.algorithm, config.budget)

    monkeypatch.setattr(trace_record, "build_algorithm", build)
    config = ["--config", '{"budget": 128, "algorithm": "quest"}']
    for words, expected in (
        ([], ("sketch", 512)),
        (["--budget", "256"], ("sketch", 256)),
        (config, ("quest", 128)),
        ([*config, "--budget", "256", "--algorithm", "sketch"], ("sketch", 256)),
        (["--config", '{"top_k": 128}'], ("sketch", 128)),
    ):
        with pytest.raises(Built) as built:
            main(["trace", "record", "--out", str(tmp_path / "a"), *words])
        assert built.value.args == expected
