"""``hisparse trace``: made-up traces are labelled everywhere, and wrong input is one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli import main, trace_record
from hisparse.config import HiSparseConfig
from hisparse.trace import SelectionTrace
from tests.command import Command
from tests.transformers.hf_models import model

_BUFFER = ["--device-buffer-size"]
SMALL = ["--context", "600", "--budget", "128", "--steps", "30"]


@pytest.fixture
def made_up(tmp_path: Path, command: Command) -> str:
    path = str(tmp_path / "a.trace")
    assert command("trace", "record", "--synthetic", *SMALL, "--out", path) == f"{path}\n"
    return path


def test_replay_and_recommend_agree(made_up: str, command: Command) -> None:
    (found,) = command.json("trace", "recommend", made_up, "--hit-ratio", "0.9")["traces"]
    size = found["device_buffer_size"]
    assert size % 16 == 0
    assert size >= 128
    buffers = f"{size - 16},{size},600"
    result = command.json("trace", "replay", made_up, *_BUFFER, buffers, "--policy", "lru,belady")
    (about,) = result["traces"]
    assert about["source"] == "made up"
    lru, belady = (about["policies"][name] for name in ("lru", "belady"))
    below, at, _ = lru["hit_ratio"]
    # The recommendation orders the pages of a selection otherwise, see docs/trace.md.
    assert below < 0.91
    assert at > 0.89
    assert all(a <= b for a, b in zip(lru["hit_ratio"], belady["hit_ratio"], strict=True))
    assert lru["bytes_per_step"][0] > lru["bytes_per_step"][1]
    assert {"commit", "machine", "versions"} <= result.keys()


@pytest.mark.parametrize("by", ["layer", "head"])
def test_made_up_traces_are_called_so(
    by: str, made_up: str, tmp_path: Path, command: Command
) -> None:
    plot = tmp_path / "a.svg"
    for line in (
        ["show", made_up],
        ["replay", made_up, *_BUFFER, "256", "--by", by, "--plot", str(plot)],
        ["recommend", made_up],
    ):
        assert "made up, by no model" in " ".join(command("trace", *line).split())
    assert "MADE UP, by no model" in plot.read_text()


def test_a_plot_without_matplotlib_is_refused(
    made_up: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    assert "--plot needs matplotlib: pip install 'hisparse[eval]'" in command.refused(
        "trace", "replay", made_up, *_BUFFER, "256", "--plot", "a.svg"
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
        (["replay", "FILE", "--plot", "a.png"], "expected a file.svg"),
        (["record", "--synthetic", *SMALL, "--out", "/nowhere/a"], "cannot create '/nowhere/a'"),
        (["record", "--synthetic", "--overlap", "2", "--out", "b"], "--overlap: got 2.0"),
        (["record", "--synthetic", "--context", "64", "--out", "b"], "--context, --budget: got 64"),
        (
            ["record", "--synthetic", "--model", "x", "--out", "b"],
            "--model: got it with --synthetic, which does not use it; leave out --model or",
        ),
        (["record", "--zipf", "1", "--out", "b"], "--zipf: expected --synthetic with it"),
        (["record", "--overlap", "0", "--out", "b"], "--overlap: expected --synthetic with it"),
        (["record", "--turns", "2", "--out", "b"], "--turns: expected --synthetic with it"),
        (
            ["record", "--block-size", "2", "--out", "b"],
            "--block-size: expected --exported with it",
        ),
        (
            ["record", "--synthetic", "--turns", "2", "--overlap", "0", "--out", "b"],
            "--overlap: got it with --turns, which does not use it",
        ),
        (
            ["record", "--synthetic", "--turns", "2", "--steps", "9", "--out", "b"],
            "--steps: got it with --turns, which does not use it",
        ),
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
    line: list[str], message: str, made_up: str, command: Command
) -> None:
    assert message in command.refused(
        "trace", *(made_up if word == "FILE" else word for word in line)
    )


def test_a_hit_ratio_out_of_reach_says_what_is_in_reach(tmp_path: Path, command: Command) -> None:
    """Pages beyond a warm start are never missing, so the trace starts without one."""
    path = tmp_path / "a.trace"
    command("trace", "record", "--synthetic", *SMALL, "--overlap", "0", "--out", str(path))
    assert "gives 100.0% hits" in " ".join(
        command("trace", "recommend", str(path), "--hit-ratio", "1").split()
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


def test_a_page_has_the_bytes_of_its_tokens(made_up: str, tmp_path: Path, command: Command) -> None:
    """Whatever the size of a page: bytes a step are those of the tokens that are read."""
    path = str(tmp_path / "b.trace")
    command("trace", "record", "--synthetic", *SMALL, "--page-size", "8", "--out", path)
    sizes = []
    for file in (made_up, path):
        with SelectionTrace(Path(file)) as trace:
            sizes.append(trace.header.page_bytes / trace.header.page_size)
    assert sizes[0] == sizes[1] > 0


def test_flags_win_over_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``record --budget`` and ``--algorithm``; without them the configuration holds."""

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
