"""Rerunning recorded calls: they give the same again, and every difference is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hisparse import kernels
from hisparse.errors import KernelError
from hisparse.kernels.build.cpu import build_cpu, cpu_library
from hisparse.types import PagedKV
from tests.kernels.isa.builds import NATIVE
from tests.kernels.isa.calls import Call, Result
from tests.kernels.isa.compare import TOLERANCE, difference
from tests.kernels.isa.recorder import Recorded, Recorder

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    """A call with integers, one with floats, and one that is refused."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.arange(6, dtype=torch.int32).view(2, 1, 3, 1)
    slots = torch.tensor([1, 4])
    table = torch.tensor([[3, 1, 0, 2]], dtype=torch.int32)
    query = torch.randn(1, 4, 32, generator=generator)
    summaries = torch.randn(4, 1, 2, 64, generator=generator)
    recorder = Recorder()
    with recorder.recording():
        kernels.gather_tokens(PagedKV(pages, pages), slots, impl="cpu")
        kernels.page_score(query, summaries, table, torch.tensor([3], dtype=torch.int32))
        with pytest.raises(KernelError, match="slots: got 6"):
            kernels.gather_tokens(PagedKV(pages, pages), slots + 2, impl="cpu")
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
    line = difference(integers.call, corrupted(integers, 2, 1), got[0])
    assert line == "argument 3: got 1 at [0, 0, 0], expected 2 (1 of 2 differ)"
    line = difference(floats.call, corrupted(floats, 4, 1e-2), got[1])
    assert line is not None
    assert line.startswith("argument 5: got")
    assert difference(floats.call, corrupted(floats, 4, TOLERANCE / 2), got[1]) is None
    # An input that a kernel overwrites.
    assert difference(floats.call, corrupted(floats, 3, 1), got[1]) is not None
    line = difference(refused.call, refused.result._replace(outcome="ok"), got[2])
    assert line == "got 'ValueError: slots: got 6 for token 1, expected 0 to 5', expected 'ok'"


def test_a_read_behind_a_tensor_stops_the_program(recorded: list[Recorded], tmp_path: Path) -> None:
    call = recorded[1].call
    buffer = call.views[1].buffer  # The last page's summary ends where the buffer does.
    before = list(call.before)
    before[buffer] = before[buffer][:-256]
    with pytest.raises(RuntimeError, match="at call 0: page_score"):
        rerun([replace(call, before=tuple(before))], tmp_path)


def test_a_kernel_that_is_missing_is_named(recorded: list[Recorded], tmp_path: Path) -> None:
    call = replace(recorded[0].call, name="gather_tokns")
    assert rerun([call], tmp_path)[0].outcome == "missing: no such kernel in the library"
