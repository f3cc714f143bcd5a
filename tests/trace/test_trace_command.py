"""``hisparse trace``: what a replay prints, and wrong input is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hisparse.cli import main
from hisparse.config import HiSparseConfig
from hisparse.trace import SelectionTrace
from tests.command import Command
from tests.trace.made import write_trace
from tests.transformers.hf_models import model

_BUFFER = ["--device-buffer-size"]


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "a.trace", steps=30))


def test_larger_buffers_hit_more_and_read_less(recorded: str, command: Command) -> None:
    line = ["trace", "replay", recorded, *_BUFFER, "128,256,1024"]
    result = command.json(*line)
    (about,) = result["traces"]
    lru = about["policies"]["lru"]
    small, middle, whole = lru["hit_ratio"]
    assert 5 / 7 - 0.05 < small < middle < whole == 1, "5 of 7 pages are those of the step before"
    assert np.mean(lru["hit_ratio_by_layer"][1]) == pytest.approx(middle)
    assert lru["bytes_per_step"][0] > lru["bytes_per_step"][1]
    assert {"commit", "machine", "versions"} <= result.keys()


def test_what_a_trace_is_of_is_shown(recorded: str, command: Command) -> None:
    said = command("trace", "replay", recorded)
    assert "random" in said
    assert "71.4% of a selection was in that of the step before" in said
    assert "2,048" in said and "8,192" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["replay", "absent"], "'absent': cannot be read: No such file"),
        (["replay", "FILE", *_BUFFER, "16"], "expected at least the 112 tokens of the longest"),
        (["replay", "FILE", *_BUFFER, "16,2048"], "got 16, 2048, expected at least the 112 tokens"),
        (["convert", "FILE", "--out", "b"], "not UTF-8 text; expected a text file"),
        (["convert", "absent", "--out", "b"], "FILE: cannot read 'absent': No such file"),
        (["record", "--model", "nothing", "--out", "b"], "unknown model 'nothing'"),
        (["record", "--algorithm", "nothing", "--out", "b"], "unknown algorithm 'nothing'"),
        (["record", "--config", "{", "--out", "b"], "--config: not JSON"),
    ],
)
def test_wrong_input_is_one_line(
    line: list[str], message: str, recorded: str, command: Command
) -> None:
    assert message in command.refused(
        "trace", *(recorded if word == "FILE" else word for word in line)
    )


def test_a_model_that_reads_a_text_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of each layer, of a small model with random weights."""
    from hisparse.eval.record_trace import record_model

    net = model("llama")
    options: dict[str, Any] = {"settings": {"budget": 80, "algorithm": "quest"}, "note": "random"}
    ids = [i % net.config.vocab_size for i in range(300)]
    path = record_model(net, ids, context=280, path=tmp_path / "a", **options)
    trace = SelectionTrace(path)
    assert trace.header.note == "random"
    assert trace.header.algorithm == "quest"
    assert trace.seq_lens.tolist() == list(range(281, 301))
    for layer in trace.header.layers:
        assert ((trace.layer(layer) >= 0).sum(-1) == 4).all()
    with pytest.raises(ValueError, match="which the budget holds"):
        record_model(net, ids[:60], context=50, path=tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_flags_win_over_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``record --budget`` and ``--algorithm``; without them the configuration holds."""

    class Built(Exception):
        pass

    def build(config: HiSparseConfig) -> Any:
        raise Built(config.algorithm, config.budget)

    monkeypatch.setattr("hisparse.eval.record_trace.build_algorithm", build)
    config = ["--config", '{"budget": 128, "algorithm": "quest"}']
    for words, expected in (
        ([], ("sketch", 2048)),
        (["--budget", "256"], ("sketch", 256)),
        (config, ("quest", 128)),
        ([*config, "--budget", "256", "--algorithm", "sketch"], ("sketch", 256)),
        (["--config", '{"top_k": 128}'], ("sketch", 128)),
    ):
        with pytest.raises(Built) as built:
            main(["trace", "record", "--out", str(tmp_path / "a"), *words])
        assert built.value.args == expected
