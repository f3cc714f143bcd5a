"""Rerunning recorded calls: they give the same again, and every difference is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hisparse import kernels
from hisparse.errors import KernelError
from hisparse.kernels import RowState
from hisparse.kernels.build.cpu import build_cpu, cpu_library
from tests.kernels.isa.builds import NATIVE
from tests.kernels.isa.calls import Call, Result
from tests.kernels.isa.compare import TOLERANCE, difference
from tests.kernels.isa.recorder import Recorded, Recorder
from tests.kernels.world import diff_slots, i32

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    """A call with integers, one with floats, and one that is refused."""
    generator = torch.Generator().manual_seed(0)
    state = RowState(i32([[0, 1, 2]]), i32([[2, 0, 1]]), i32([[7, 8, 9]]))
    selection = i32([[1, 3, -1]])
    table = i32([[3, 1, 0, 2]])
    query = torch.randn(1, 4, 32, generator=generator)
    summaries = torch.randn(4, 1, 2, 64, generator=generator)
    recorder = Recorder()
    with recorder.recording():
        diff_slots(selection, table, i32([3]), i32([1]), state, impl="cpu")
        kernels.page_score(query, summaries, table, i32([3]))
        with pytest.raises(KernelError, match="selection: got page 4"):
            diff_slots(selection + 1, table, i32([3]), i32([1]), state, impl="cpu")
    return recorder.recorded


def rerun(calls: list[Call], folder: Path) -> list[Result]:
    return NATIVE.rerun(calls, build_cpu(), folder)


def test_what_was_recorded_happens_again(recorded: list[Recorded], tmp_path: Path) -> None:
    results = rerun([record.call for record in recorded], tmp_path)
    assert [result.outcome.partition(":")[0] for result in results] == ["ok", "ok", "ValueError"]
    for (_, call, expected), got in zip(recorded, results, strict=True):
        assert difference(call, expected, got) is None


def corrupted(record: Recorded, argument: int, change: float) -> Result:
    """The recorded result with one number changed, the first of an argument."""
    buffers = [bytearray(memory) for memory in record.result.buffers]
    record.call.views[argument].of(buffers).view(-1)[0] += change
    return record.result._replace(buffers=buffers)


def test_a_corrupted_result_is_found(recorded: list[Recorded], tmp_path: Path) -> None:
    integers, floats, refused = recorded
    got = rerun([record.call for record in recorded], tmp_path)
    line = difference(integers.call, corrupted(integers, 12, 1), got[0])
    assert line == "argument 15: got 8 at [0, 0], expected 9 (1 of 4 differ)"
    line = difference(floats.call, corrupted(floats, 4, 1e-2), got[1])
    assert line is not None
    assert line.startswith("argument 5: got")
    assert difference(floats.call, corrupted(floats, 4, TOLERANCE / 2), got[1]) is None
    # An input that a kernel overwrites.
    assert difference(floats.call, corrupted(floats, 3, 1), got[1]) is not None
    line = difference(refused.call, refused.result._replace(outcome="ok"), got[2])
    assert line is not None
    assert line.endswith("selection: got page 4 in row 0, expected -1 to 3', expected 'ok'")
