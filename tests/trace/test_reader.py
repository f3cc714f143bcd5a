"""Traces are read as they were written; tests/hostile has damage in whole members."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import ConfigError
from hisparse.trace import SelectionTrace, adjacent_overlap, replay_hits
from hisparse.trace.file import FORMAT, RecordedStep, TraceWriter
from tests.trace.made import HEADER, write_trace


@given(data=st.data())
def test_a_trace_is_read_as_it_was_written(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Near and far pages, empty selections, and even ones in a wrong order."""
    layers, count, heads, width = (data.draw(st.integers(1, 3)) for _ in range(4))
    page = st.one_of(st.integers(0, 20), st.integers(0, 4_000_000))
    rows = [
        data.draw(st.lists(page, max_size=width, unique=True))
        for _ in range(layers * count * heads)
    ]
    pages = np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)
    pages = pages.reshape(layers, count, heads, width)
    each = {"layers": tuple(range(layers)), "attended_by": (1,) * layers}
    header = replace(HEADER, page_size=4, heads=heads, max_pages=width, **each)
    writer = TraceWriter(tmp_path_factory.mktemp("a") / "a", header, 1 << 30)
    lengths = 16_100_000 + np.arange(count)
    assert writer.put(RecordedStep(np.arange(count), lengths, torch.from_numpy(pages)))
    writer.close()
    trace = SelectionTrace(writer.path)
    assert trace.header == header
    assert trace.requests.tolist() == [*range(count)]
    assert np.array_equal(trace.seq_lens, lengths)
    for layer in range(layers):
        assert np.array_equal(trace.layer(layer), pages[layer])


def test_overlap_hits_and_bytes_of_a_known_trace(tmp_path: Path) -> None:
    """5 of 7 pages are those of the step before."""
    trace = SelectionTrace(write_trace(tmp_path / "a", steps=50, requests=2))
    assert np.allclose(adjacent_overlap(trace), 5 / 7)
    assert trace.layer(1).shape == (100, 2, 7)
    one, whole = 7 * 16, 1 << 20
    hits = replay_hits(trace, [one, whole])
    selected = 2 * 2 * 700  # Two layers of two heads.
    # A buffer of one selection hits what the step before selected; the first step has none.
    assert hits["hit_ratio"] == [pytest.approx(5 / 7 * 49 / 50, abs=0.01), 1.0]
    misses = selected - hits["hits"][0]
    assert hits["bytes_per_step"] == [pytest.approx(misses * 4096 / 100), 0.0]
    assert np.mean(hits["hit_ratio_by_layer"][0]) == pytest.approx(hits["hit_ratio"][0])


def test_a_changed_byte_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """What is read in spite of it is the trace, or a beginning of it."""
    path = write_trace(tmp_path / "a")
    data, whole = path.read_bytes(), SelectionTrace(path)
    rng, read = random.Random(0), 0
    for _ in range(200):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            trace = SelectionTrace(path)
        except ConfigError:
            continue
        read += 1
        count = len(trace.seq_lens)
        assert trace.seq_lens.tolist() == whole.seq_lens[:count].tolist()
        assert np.array_equal(trace.layer(1), whole.layer(1)[:count])
    assert read < 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header: not JSON"),
        (b"hisparse trace 3", "cannot be read: BadGzipFile: Not a gzipped file"),
        (gzip.compress(b"{}"), "got another format, expected 'hisparse trace 4'"),
        (gzip.compress(json.dumps({"format": FORMAT}).encode()), "header.note: got nothing"),
        (gzip.compress(b"\xff"), "cannot be read: UnicodeDecodeError"),
    ],
    ids=["empty", "earlier", "object", "header", "bytes"],  # A gzip has the time in it.
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        SelectionTrace(path)


def test_a_trace_that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    """A few bytes may stand for many zeros."""
    path = tmp_path / "a"
    header = {"format": FORMAT} | asdict(replace(HEADER, max_pages=1 << 30))
    path.write_bytes(gzip.compress(json.dumps(header).encode() + b"\n\1\0\0\0"))
    with pytest.raises(ConfigError, match="got 4294967298 numbers, expected at most 1073741824"):
        SelectionTrace(path)
