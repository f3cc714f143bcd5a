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
from hisparse.trace.writer import RecordedStep, TraceWriter
from tests.trace.made import HEADER

HEADER = replace(HEADER, heads=1, max_pages=8)


def step_of(seq_len: int, visits: int) -> RecordedStep:
    """A step of ``HEADER``, of ``visits`` requests that select the pages 0 to 7."""
    pages = torch.arange(8, dtype=torch.int32).expand(2, visits, 1, 8)
    return RecordedStep(np.arange(visits), np.full(visits, seq_len), pages.contiguous())


def test_bytes_that_wait_are_bounded_and_written_by_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 5 requests, 320 bytes; a chunk takes 12 requests. One step of any size may wait."""
    gate, begun, taken = threading.Event(), threading.Event(), []
    write = TraceWriter._write_steps

    def slowly(writer: Any, steps: list[RecordedStep]) -> None:
        taken.append([len(step.slots) for step in steps])
        begun.set()
        gate.wait()
        write(writer, steps)

    monkeypatch.setattr("hisparse.trace.writer._QUEUED_BYTES", 5 * 320)
    monkeypatch.setattr("hisparse.trace.writer._CHUNK_PAGES", 12 * 16)
    monkeypatch.setattr(TraceWriter, "_write_steps", slowly)
    path = tmp_path / "a.trace"
    writer = TraceWriter(path, HEADER, 1 << 20)
    assert path.stat().st_mode & 0o777 == 0o600
    assert writer.put(step_of(200, 30))
    assert begun.wait(60)
    assert [writer.put(step_of(201 + at, 5)) for at in range(6)] == [True] * 5 + [False]
    gate.set()
    writer.close()
    assert taken == [[30], [5, 5], [5, 5], [5]]
    with SelectionTrace(path) as trace:
        assert trace.end is not None
        assert trace.end.dropped_steps == 1
        assert trace.visits.seq_lens.tolist() == [200] * 30 + [
            x for x in range(201, 206) for _ in range(5)
        ]
        assert trace.layer(1)[1].tolist() == [*range(8)] * 55


def test_a_step_beside_the_end_is_written_or_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that comes when the thread has found nothing more to write."""
    path, handed = tmp_path / "a.trace", []
    writer = TraceWriter(path, HEADER, 1 << 20)
    take = TraceWriter._take

    def late(self: TraceWriter, *, closing: bool) -> list[RecordedStep]:
        steps = take(self, closing=closing)
        if closing and not steps:
            handed.append(writer.put(step_of(201, 1)))
        return steps

    monkeypatch.setattr(TraceWriter, "_take", late)
    assert writer.put(step_of(200, 1))
    writer.close()
    with SelectionTrace(path) as trace:
        assert trace.end is not None
        assert len(trace.visits.requests) + trace.end.dropped_steps == 1 + len(handed) == 2


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
