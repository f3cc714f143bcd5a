"""``hisparse trace``: what a replay prints, and wrong input is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse.trace import SelectionTrace
from hisparse.transformers import disable, enable
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
    ],
)
def test_wrong_input_is_one_line(
    line: list[str], message: str, recorded: str, command: Command
) -> None:
    assert message in command.refused(
        "trace", *(recorded if word == "FILE" else word for word in line)
    )


def test_a_model_that_reads_a_text_is_recorded(tmp_path: Path) -> None:
    """Each step of each layer, of a small model with random weights."""
    net, path = model("llama"), tmp_path / "a"
    settings = {"budget": 80, "algorithm": "quest", "trace": {"path": str(path), "note": "random"}}
    cache = enable(net, settings, max_length=300)
    ids = torch.arange(300)[None] % net.config.vocab_size
    with torch.no_grad():
        for part in ids.split([280, *[1] * 20], dim=1):
            net(part, past_key_values=cache)
    disable(net)  # Other tests use it too.
    recorder: Any = cache.coordinator.extensions["trace"]
    recorder.close()
    trace = SelectionTrace(path)
    assert trace.header.note == "random"
    assert trace.header.algorithm == "quest"
    assert trace.seq_lens.tolist() == list(range(281, 301))
    for layer in trace.header.layers:
        assert ((trace.layer(layer) >= 0).sum(-1) == 4).all()
