"""``hisparse trace``: replay and recommendation agree, and wrong input is one line."""

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


def test_replay_and_recommend_agree(recorded: str, command: Command) -> None:
    (found,) = command.json("trace", "recommend", recorded, "--hit-ratio", "0.9")["traces"]
    size = found["device_buffer_size"]
    assert size % 16 == 0
    assert size >= 128
    buffers = f"{size - 16},{size},600"
    result = command.json("trace", "replay", recorded, *_BUFFER, buffers, "--policy", "lru,belady")
    (about,) = result["traces"]
    lru, belady = (about["policies"][name] for name in ("lru", "belady"))
    below, at, _ = lru["hit_ratio"]
    assert below < 0.9 <= at == found["hit_ratio"]
    assert np.mean(lru["hit_ratio_by_layer"][1]) == pytest.approx(at)
    assert all(a <= b for a, b in zip(lru["hit_ratio"], belady["hit_ratio"], strict=True))
    assert lru["bytes_per_step"][0] > lru["bytes_per_step"][1]
    assert {"commit", "machine", "versions"} <= result.keys()


def test_what_a_trace_is_of_is_shown(recorded: str, command: Command) -> None:
    for line in (["show", recorded], ["replay", recorded, *_BUFFER, "256"]):
        assert "random" in command("trace", *line)
    assert "71.4% of a selection was in that of the step before" in command(
        "trace", "show", recorded
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["show", "absent"], "'absent': cannot be read: No such file"),
        (["replay", "FILE", *_BUFFER, "16"], "expected at least the 112 tokens of the longest"),
        (["replay", "FILE", *_BUFFER, "16,2048"], "got 16, 2048, expected at least the 112 tokens"),
        (["replay", "FILE", "--capacity", "100"], "--capacity: got it with traces of selections"),
        (["replay", "FILE", "--ttl", "60"], "--ttl: got it with traces of selections"),
        (["replay", "FILE", "--policy", "mru"], "unknown policy 'mru'"),
        (["record", "--block-size", "2", "--out", "b"], "--block-size: got 2 without --exported"),
        (
            ["record", "--exported", "a", "--budget", "512", "--out", "b"],
            "--budget: got it with --exported, which does not use it",
        ),
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
    with SelectionTrace(path) as trace:
        assert trace.header.note == "random"
        assert trace.header.algorithm == "quest"
        assert trace.visits.seq_lens.tolist() == list(range(281, 301))
        for layer in trace.header.layers:
            assert (trace.layer(layer).lengths == 4).all()
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
