"""Traces are read as they were written; tests/hostile has damage behind fitting checksums."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import ConfigError
from hisparse.trace import SelectionTrace, adjacent_overlap, lru_curve
from hisparse.trace.format import (
    HEAD,
    MAGIC,
    STEP,
    TraceHeader,
    Visits,
    decode_layer,
    decode_visits,
    encode_chunk,
    encode_steps,
    split_sections,
)
from hisparse.trace.synthetic import MadeUpTrace


def header(heads: int, max_pages: int, layers: int) -> TraceHeader:
    return TraceHeader(
        source="recorded", note="", algorithm="quest", scope="kv_head", page_size=4, page_bytes=1,
        heads=heads, max_pages=max_pages, layers=tuple(range(layers)), attended_by=(1,) * layers,
    )  # fmt: skip


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
        by_head = pages[layer].transpose(1, 0, 2)
        assert np.array_equal(found.lengths, (by_head >= 0).sum(-1))
        assert np.array_equal(found.pages, by_head[by_head >= 0])


def test_made_up_traces_have_the_overlap_that_was_asked_for(tmp_path: Path) -> None:
    made = MadeUpTrace(context=4096, budget=512, overlap=0.9, steps=50, requests=2, heads=3)
    with SelectionTrace(made.write(tmp_path / "a")) as trace:
        assert trace.header.source == "made up"
        assert np.allclose(adjacent_overlap(trace), 28 / 31)
        assert trace.layer(2).lengths.shape == (3, 100)
        curve = lru_curve(trace)
        # A buffer of one selection hits what the step before selected; the first step has none.
        assert abs(curve.hit_ratio(curve.least_tokens) - 28 / 31 * 49 / 50) < 0.01
        assert curve.hit_ratio(1 << 20) == 1.0
        assert curve.bytes_per_step(1 << 20) == 0.0
        assert curve.tokens_for(0.0) == curve.least_tokens
        assert curve.tokens_for(0.0, 512) == 512
        wanted = curve.tokens_for(0.95)
        assert wanted is not None
        assert curve.hit_ratio(wanted) >= 0.95 > curve.hit_ratio(wanted - 16)
        with pytest.raises(ConfigError, match="buffer: got 16 tokens, expected at least the 496"):
            curve.hit_ratio(16)


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
    about = encode_chunk(HEAD, header(1, 1, 128).to_json())
    path = tmp_path / "a"
    path.write_bytes(MAGIC + about + encode_chunk(STEP, encode_steps(visits, pages)))
    with pytest.raises(ConfigError, match=message):
        SelectionTrace(path)


def test_a_changed_byte_is_found_or_ends_the_file(tmp_path: Path) -> None:
    """What is read in spite of it is a beginning of the trace, as of a process that was killed."""
    made = MadeUpTrace(context=600, budget=128, overlap=0.8, steps=20, layers=2)
    path = made.write(tmp_path / "a")
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
        (b"hisparse trace 2\n", "is no trace of selections"),
        (MAGIC, "its header is damaged"),
        (MAGIC + encode_chunk(b"HEAD", b"{}"), "header.source: got nothing"),
        (MAGIC + encode_chunk(b"HEAD", b"\xff"), "is damaged"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        SelectionTrace(path)
