"""The writer of a trace: what may wait for it, what it writes at once, how it ends, its options."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse.errors import ConfigError
from hisparse.testing import Simulator
from hisparse.trace import SelectionTrace
from hisparse.trace.file import RecordedStep, TraceWriter
from tests.trace.made import HEADER

HEADER = replace(HEADER, heads=1, max_pages=8)


def step_of(seq_len: int, visits: int) -> RecordedStep:
    """A step of ``HEADER``, of ``visits`` requests that select the pages 0 to 7."""
    pages = torch.arange(8, dtype=torch.int32).expand(2, visits, 1, 8)
    return RecordedStep(np.arange(visits), np.full(visits, seq_len), pages.contiguous())


def test_bytes_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 5 requests, 320 bytes. One step of any size may be written."""
    gate, take = threading.Event(), TraceWriter._take

    def slowly(writer: TraceWriter, step: RecordedStep) -> None:
        gate.wait()
        take(writer, step)

    monkeypatch.setattr("hisparse.trace.file._QUEUED_BYTES", 5 * 320)
    monkeypatch.setattr(TraceWriter, "_take", slowly)
    path = tmp_path / "a.trace"
    writer = TraceWriter(path, HEADER, 1 << 20)
    assert path.stat().st_mode & 0o777 == 0o600
    assert writer.put(step_of(200, 30))
    assert [writer.put(step_of(201 + at, 5)) for at in range(6)] == [True] * 5 + [False]
    gate.set()
    writer.close()
    trace = SelectionTrace(path)
    assert trace.end is not None
    assert trace.end.dropped_steps == 1
    lengths = [200] * 30 + [x for x in range(201, 206) for _ in range(5)]
    assert trace.seq_lens.tolist() == lengths
    assert trace.layer(1).tolist() == [[[*range(8)]]] * 55


def test_a_file_that_ends_early_has_its_whole_steps(tmp_path: Path) -> None:
    path, ends = tmp_path / "a.trace", []
    writer = TraceWriter(path, HEADER, 1 << 20)
    for at in range(4):
        assert writer.put(step_of(200 + at, 1))
        writer.flush()
        ends.append(path.stat().st_size)
    writer.close()
    data = path.read_bytes()
    for cut in range(ends[3] + 2, len(data)):
        path.write_bytes(data[:cut])
        trace = SelectionTrace(path)
        assert trace.end is None or cut > len(data) - 9  # The checksum is cut.
        assert trace.seq_lens.tolist() == [*range(200, 204)]
    for count in (1, 2, 3):
        for cut in (ends[count - 1], ends[count - 1] + 2, (ends[count - 1] + ends[count]) // 2):
            path.write_bytes(data[:cut])
            trace = SelectionTrace(path)
            assert trace.end is None
            assert trace.seq_lens.tolist() == [*range(200, 200 + count)]
    path.write_bytes(data[: ends[0] - 20])
    with pytest.raises(ConfigError, match="has no selections"):
        SelectionTrace(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "trace: path: got ''"),
        ({"path": "x", "max_bytes": "1"}, "max_bytes: got '1', expected a size"),
        ({"path": "x", "size": 1}, "unknown trace option 'size'"),
        ({"path": "/dev/null/x"}, "trace.path: cannot create '/dev/null/x': Not a directory"),
        (3, "trace: got 3 "),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulator(extensions={"trace": options})
