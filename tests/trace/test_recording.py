"""A trace holds each step's selection, never stops a server, and grows as far as allowed."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hisparse.engine.extensions.trace import Trace
from hisparse.testing import Simulator
from hisparse.testing.recording import ReplayingSimulator
from hisparse.trace import SelectionTrace, replay_hits
from hisparse.trace.file import TraceWriter
from hisparse.types import Selection

#: ``(layer, slot, seq_len) -> [H, K] pages``.
Seen = dict[tuple[int, int, int], torch.Tensor]


def observed(sim: Simulator) -> Seen:
    """What an observer sees from now on."""
    seen: Seen = {}

    def observe(layer: int, _queries: Any, step: Any, selection: Any) -> None:
        for row, slot in enumerate(step.slots.tolist()):
            seen[layer, slot, int(step.seq_lens[row])] = selection.pages[row].clone()

    sim.coordinator.observe(observe)
    return seen


def recorder(sim: Simulator) -> Trace:
    trace: Any = sim.coordinator.extensions["trace"]
    return trace


def close(sim: Simulator) -> None:
    recorder(sim).close()


def pages_of(trace: SelectionTrace, layer: int) -> dict[tuple[int, int, int], list[int]]:
    """By request, sequence length and head."""
    visits = zip(trace.requests.tolist(), trace.seq_lens.tolist(), trace.layer(layer), strict=True)
    return {
        (request, seq_len, head): row[row >= 0].tolist()
        for request, seq_len, rows in visits
        for head, row in enumerate(rows)
    }


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_a_trace_has_what_was_selected(scope: Any, tmp_path: Path) -> None:
    """Two requests that come and go, one of them within the budget; a slot that is used again."""
    path = tmp_path / "a.trace"
    sim = Simulator(scope=scope, extensions={"trace": str(path)}, dense_layers=(1,), reuse_layers=1)
    seen = observed(sim)
    long, short = sim.request(1, 300, seed=1), sim.request(2, 300, seed=2)
    sim.prefill((long, 200), (short, 20))
    for _ in range(5):
        sim.decode(short, long)
    sim.end(long, free=True)
    again = sim.request(1, 300, seed=3)
    sim.prefill((again, 150))
    for _ in range(4):
        sim.decode(again)
    close(sim)
    trace = SelectionTrace(path)
    assert trace.end is not None
    assert trace.end.dropped_steps == 0
    assert trace.requests.tolist() == [0] * 5 + [1] * 4
    assert trace.seq_lens.tolist() == [*range(201, 206), *range(151, 155)]
    layers = [x for x in range(sim.layers) if x != 1]
    assert list(trace.header.layers) == layers
    for layer in layers:
        for (_, seq_len, head), pages in pages_of(trace, layer).items():
            expected = [p for p in seen[layer, 1, seq_len][head].tolist() if p >= 0]
            assert pages == expected
    assert trace.header.algorithm == sim.config.algorithm
    assert trace.header.page_bytes == sim.manager.device.page_bytes
    assert sim.coordinator.stats().extensions["trace_steps"] == 9
    assert sim.coordinator.stats().extensions["trace_dropped_steps"] == 0


def test_replay_counts_what_the_engine_counted(tmp_path: Path) -> None:
    """A request whose row does not grow: a replay of the row's size has the engine's hits."""
    path, size = tmp_path / "a.trace", Simulator.device_buffer
    sim = Simulator(extensions={"trace": str(path)}, max_row=size)
    request = sim.request(1, 400, seed=1)
    sim.prefill((request, 300))
    for _ in range(60):
        sim.decode(request)
    close(sim)
    stats = sim.coordinator.stats()
    trace = SelectionTrace(path)
    found = replay_hits(trace, [size])
    assert found["hits"] == [stats.hit_pages]
    assert found["hit_ratio"] == [stats.hit_pages / (stats.hit_pages + stats.miss_pages)]


def test_a_taken_name_is_numbered(tmp_path: Path) -> None:
    for _ in range(2):
        sim = Simulator(extensions={"trace": {"path": str(tmp_path / "a.trace"), "note": "x"}})
        close(sim)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-2.trace", "a.trace"]


def decoding(path: Path, steps: int, **options: Any) -> Simulator:
    sim = Simulator(extensions={"trace": {"path": str(path)} | options})
    request = sim.request(1, 250 + steps, seed=1)
    sim.prefill((request, 200))
    for _ in range(steps):
        sim.decode(request)
    return sim


def test_a_writer_that_is_behind_drops_steps_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    take = TraceWriter._take
    monkeypatch.setattr("hisparse.trace.file._QUEUED_STEPS", 4)

    def slowly(writer: Any, step: Any) -> None:
        gate.wait()
        take(writer, step)

    monkeypatch.setattr(TraceWriter, "_take", slowly)
    sim = decoding(tmp_path / "a.trace", 40)
    counted = sim.coordinator.stats().extensions
    gate.set()
    close(sim)
    assert counted["trace_steps"] + counted["trace_dropped_steps"] == 40
    assert counted["trace_dropped_steps"] >= 30
    trace = SelectionTrace(tmp_path / "a.trace")
    assert len(trace.requests) == counted["trace_steps"]
    assert trace.end is not None
    assert trace.end.dropped_steps == counted["trace_dropped_steps"]


def test_a_file_grows_no_further_than_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.trace"
    with caplog.at_level(logging.WARNING, "hisparse"):
        sim = Simulator(extensions={"trace": {"path": str(path), "max_bytes": 1500}})
        request = sim.request(1, 300, seed=1)
        sim.prefill((request, 200))
        for _ in range(39):
            sim.decode(request)
        recorder(sim).flush()
        # The counter has what the file lacks, as of the last step.
        sim.decode(request)
        counted = sim.coordinator.stats().extensions["trace_dropped_steps"]
        close(sim)
    assert 1000 < path.stat().st_size <= 1500
    assert "has reached max_bytes (1500)" in caplog.text
    trace = SelectionTrace(path)
    assert trace.end is not None
    assert trace.end.reason.endswith("max_bytes (1500)")
    assert len(trace.requests) + trace.end.dropped_steps == 40
    assert counted == trace.end.dropped_steps


def test_a_disk_that_fails_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, data: bytes, **_: Any) -> None:
        raise OSError(28, "No space left on device")

    sim = Simulator(extensions={"trace": str(tmp_path / "a.trace")})
    monkeypatch.setattr(TraceWriter, "_write", fail)
    request = sim.request(1, 300, seed=1)
    sim.prefill((request, 200))
    with caplog.at_level(logging.WARNING, "hisparse"):
        for _ in range(3):
            sim.decode(request)
        close(sim)
        sim.decode(request)
    assert "No space left on device" in caplog.text
    # Three that were taken and never written, and one that was refused.
    assert sim.coordinator.stats().extensions["trace_dropped_steps"] == 4


def test_a_flush_writes_what_was_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    sim = decoding(path, 5)
    recorder(sim).flush()
    trace = SelectionTrace(path)
    assert len(trace.requests) == 5
    close(sim)
    recorder(sim).flush()


def test_selections_of_another_width_are_padded(tmp_path: Path) -> None:
    """An algorithm may return fewer columns than the most that it may select."""
    path = tmp_path / "a.trace"
    sim = Simulator(extensions={"trace": str(path)})
    trace, policy = recorder(sim), sim.policy
    slots, seq_lens = np.array([2, 4]), np.array([8, 900])
    step: Any = SimpleNamespace(slots=torch.from_numpy(slots))
    for widths in ((policy.max_pages, 1, 1, 2), (1, 1, 1, 1)):
        # The first request fits the budget.
        trace.before_step(slots, seq_lens, np.array([True, True]))
        for layer in range(sim.layers):
            width = widths[layer % 4]
            pages = torch.arange(2 * width, dtype=torch.int32).view(2, 1, width)
            pages = pages.expand(-1, policy.heads, -1).contiguous()
            trace.after_selection(layer, Selection(pages, torch.tensor([])), step)
        trace.after_step(complete=True)
        seq_lens = seq_lens + 1
    close(sim)
    found = SelectionTrace(path)
    assert found.seq_lens.tolist() == [900, 901]
    for layer in range(sim.layers):
        first, width = (policy.max_pages, 1, 1, 2)[layer % 4], policy.heads
        rows = [row[row >= 0].tolist() for row in found.layer(layer).reshape(2 * width, -1)]
        assert rows == [[*range(first, 2 * first)]] * width + [[1]] * width


@pytest.mark.parametrize("in_all_layers", [False, True])
def test_an_algorithm_may_return_the_same_tensor_again(tmp_path: Path, in_all_layers: bool) -> None:
    """In each step, or even in each layer."""
    path = tmp_path / "a.trace"
    sim = Simulator(extensions={"trace": str(path)})
    seen, own = observed(sim), {}
    retrieve = sim.algorithm.retrieve_topk

    def same_tensor(queries: Any, layer_id: int, step: Any) -> Selection:
        pages, lengths = retrieve(queries, layer_id, step)
        kept = own.setdefault(0 if in_all_layers else layer_id, torch.empty(1 << 12).int())
        view = kept[: pages.numel()].view(pages.shape)
        return Selection(view.copy_(pages), lengths)

    object.__setattr__(sim.algorithm, "retrieve_topk", same_tensor)
    request = sim.request(1, 300, seed=1)
    sim.prefill((request, 200))
    for _ in range(6):
        sim.decode(request)
    close(sim)
    counted = sim.coordinator.stats().extensions
    assert (counted["trace_steps"], counted["trace_dropped_steps"]) == (6, 0)
    trace = SelectionTrace(path)
    for layer in range(sim.layers):
        found = pages_of(trace, layer)
        assert len(found) == 6 * sim.policy.heads
        for (_, seq_len, head), pages in found.items():
            expected = [p for p in seen[layer, 1, seq_len][head].tolist() if p >= 0]
            assert pages == expected


def test_steps_that_are_replayed_from_a_graph_are_in_the_trace(tmp_path: Path) -> None:
    """The same as those of eager steps; padding and dense requests are not. So is the step before a
    capture while requests run, as a server's after an update of its weights.
    """

    def play(sim: Simulator, path: Path) -> list[dict[tuple[int, int, int], list[int]]]:
        long, short = sim.request(1, 190, seed=1), sim.request(2, 190, seed=2)
        sim.prefill((long, 101), (short, 6))
        for _ in range(6):
            sim.decode(short, long)
        if isinstance(sim, ReplayingSimulator):
            sim.capture()
        sim.decode(long, short)
        sim.end(long)
        long = sim.request(1, 190, seed=4)
        sim.prefill((long, 90))
        for _ in range(3):
            sim.decode(long, short)
        close(sim)
        trace = SelectionTrace(path)
        return [pages_of(trace, layer) for layer in range(sim.layers)]

    made = []
    for cls in (Simulator, ReplayingSimulator):
        path = tmp_path / cls.__name__
        sim = cls(extensions={"trace": str(path)}, max_row=1536)
        made.append(play(sim, path))
        assert len(made[-1][0]) == 10 * sim.policy.heads
    assert sim.num_replayed == 10
    assert made[0] == made[1]


def test_a_captured_step_that_runs_as_it_is_captured_is_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its selections have the rows of the padding, which an eager step has not."""
    made = []
    for as_captured in (False, True):
        path = tmp_path / f"{as_captured}.trace"
        sim = ReplayingSimulator(extensions={"trace": str(path)})
        if as_captured:
            monkeypatch.setattr(sim.recording, "replay", sim.run)
        request = sim.request(2, 190, seed=1)
        sim.prefill((request, 101))
        for _ in range(3):
            sim.decode(request)
        close(sim)
        trace = SelectionTrace(path)
        made.append([pages_of(trace, layer) for layer in range(sim.layers)])
    assert made[0] == made[1]
    assert len(made[0][0]) == 3 * sim.policy.heads


def test_a_replayed_step_ends_before_a_capture_begins(tmp_path: Path) -> None:
    """A capture must not take into its graph what ends a step on the host."""
    path = tmp_path / "a.trace"
    sim = ReplayingSimulator(extensions={"trace": str(path)})
    request = sim.request(1, 190, seed=1)
    sim.prefill((request, 101))
    sim.decode(request)
    sim.coordinator.prepare_capture()
    recorder(sim).flush()
    trace = SelectionTrace(path)
    assert trace.seq_lens.tolist() == [102]
    close(sim)
