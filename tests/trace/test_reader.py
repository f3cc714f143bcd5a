"""Traces are read as they were written; tests/hostile has damage behind fitting checksums."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import ConfigError
from hisparse.trace import SelectionTrace, adjacent_overlap, replay_hits
from hisparse.trace.format import (
    MAGIC,
    STEP,
    TraceHeader,
    Visits,
    decode_layer,
    decode_visits,
    encode_about,
    encode_chunk,
    encode_steps,
    split_sections,
)
from tests.trace.made import HEADER, write_trace


def header(heads: int, max_pages: int, layers: int) -> TraceHeader:
    each = {"layers": tuple(range(layers)), "attended_by": (1,) * layers}
    return replace(HEADER, page_size=4, heads=heads, max_pages=max_pages, **each)


@given(st.data())
def test_a_chunk_is_read_as_it_was_written(data: st.DataObject) -> None:
    """Near and far pages, empty selections, and even ones in a wrong order."""
    layers, count, heads, width = (data.draw(st.integers(1, 3)) for _ in range(4))
    page = st.one_of(st.integers(0, 20), st.integers(0, 2**31 - 1))
    rows = [
        data.draw(st.lists(page, max_size=width, unique=True))
        for _ in range(layers * count * heads)
    ]
    pages = np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)
    pages = pages.reshape(layers, count, heads, width)
    visits = Visits(np.arange(count, dtype=np.int32), np.arange(5, 5 + count, dtype=np.int32))
    content = encode_steps(visits, pages)
    told, sections = split_sections(content, layers)
    assert told == count
    for got, put in zip(decode_visits(content[slice(*sections[0])], count), visits, strict=True):
        assert np.array_equal(got, put)
    for layer, at in enumerate(sections[1:]):
        found = decode_layer(content[slice(*at)], count, header(heads, width, layers))
        assert np.array_equal(found.lengths, (pages[layer] >= 0).sum(-1))
        assert np.array_equal(found.pages, pages[layer][pages[layer] >= 0])


def test_overlap_hits_and_bytes_of_a_known_trace(tmp_path: Path) -> None:
    """5 of 7 pages are those of the step before."""
    with SelectionTrace(write_trace(tmp_path / "a", steps=50, requests=2)) as trace:
        assert np.allclose(adjacent_overlap(trace), 5 / 7)
        assert trace.layer(1).lengths.shape == (100, 2)
        one, whole = 7 * 16, 1 << 20
        hits = replay_hits(trace, [one, whole])
        selected = 2 * 2 * 700  # Two layers of two heads.
        # A buffer of one selection hits what the step before selected; the first step has none.
        assert hits["hit_ratio"] == [pytest.approx(5 / 7 * 49 / 50, abs=0.01), 1.0]
        misses = selected - hits["hits"][0]
        assert hits["bytes_per_step"] == [pytest.approx(misses * 4096 / 100), 0.0]
        assert np.mean(hits["hit_ratio_by_layer"][0]) == pytest.approx(hits["hit_ratio"][0])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(1 << 25, "got a context of 33554432 tokens"), (1 << 24, "a replay needs 4 GiB")],
)
def test_a_trace_that_needs_too_much_memory_is_refused(
    tokens: int, message: str, tmp_path: Path
) -> None:
    """A few bytes may name a page far out, in many layers."""
    pages = np.zeros((128, 1, 1, 1), np.int32)
    visits = Visits(np.zeros(1, np.int32), np.full(1, tokens, np.int32))
    about = encode_about(header(1, 1, 128))
    path = tmp_path / "a"
    path.write_bytes(MAGIC + about + encode_chunk(STEP, encode_steps(visits, pages)))
    with pytest.raises(ConfigError, match=message):
        SelectionTrace(path)


def test_a_changed_byte_is_found_or_ends_the_file(tmp_path: Path) -> None:
    """What is read in spite of it is a beginning of the trace, as of a process that was killed."""
    path = write_trace(tmp_path / "a")
    data = path.read_bytes()
    rng, read = random.Random(0), []
    for _ in range(200):
        changed = bytearray(data)
        changed[rng.randrange(len(MAGIC), len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            with SelectionTrace(path) as trace:
                read.append(trace.end)
        except ConfigError:
            continue
    assert len(read) < 20
    assert not any(read)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read: it is empty"),
        (b"hisparse trace 1\n", r"got b'hisparse trace 1\\n' at its start, expected b'"),
        (MAGIC, "its header is damaged: got the end of the file, expected a chunk b'HEAD'"),
        (MAGIC + encode_chunk(b"HEAD", b"{}"), "header.note: got nothing"),
        (MAGIC + encode_chunk(b"HEAD", b"\xff"), "is damaged"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        SelectionTrace(path)
