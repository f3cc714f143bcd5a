"""Reads traces of selections; a damaged file is refused with one line."""

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np

from hisparse.errors import ConfigError
from hisparse.options import from_options, parse_object
from hisparse.trace.format import (
    CHUNK,
    DONE,
    HEAD,
    MAGIC,
    STEP,
    LayerPages,
    TraceEnd,
    TraceHeader,
    Visits,
    checksum,
    decode_layer,
    decode_visits,
    split_sections,
)

R = TypeVar("R")

#: Longer contexts are refused: replay needs memory for all of their pages.
_MAX_TOKENS = 1 << 24
#: Counters of a replay, 8 bytes each: one for each page of the longest context, in each stream.
_MAX_COUNTERS = 1 << 28


class Selections(NamedTuple):
    """Selections of several streams; a stream is one request's row in one layer.

    Attributes:
        pages: ``[N] int32``, the pages of all selections; those of one selection differ.
        offsets: ``[M + 1] int64``, the first page of each of M selections.
        streams: ``[S + 1] int64``, the first selection of each stream; none is empty.
        full_pages: ``[M] int32``, complete pages of the context at each selection. All 0: the
            stream starts with an empty cache.
    """

    pages: np.ndarray
    offsets: np.ndarray
    streams: np.ndarray
    full_pages: np.ndarray

    @property
    def num_pages(self) -> int:
        """One more than the largest page."""
        return max(1, int(self.full_pages.max(initial=0)), int(self.pages.max(initial=-1)) + 1)

    def steps(self, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each selection of a stream, and the pages completed since the one before."""
        full = 0
        for row in range(*self.streams[stream : stream + 2]):
            completed = np.arange(full, self.full_pages[row])
            full += len(completed)
            yield self.pages[slice(*self.offsets[row : row + 2])], completed


class SelectionTrace:
    """A trace of selections. Close it with a ``with`` block.

    All checksums are verified when the file is opened; pages are decoded layer by layer.

    Args:
        path: the file.

    Attributes:
        header: what the trace is of.
        end: how the recording ended; None: the file ends early, because the process was killed.
        visits: all decode steps of all requests, in the order of time.
        num_bytes: size of the file.

    Raises:
        ConfigError: the file cannot be read, is not a trace, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._name = repr(str(path))
        self._data = self._open(path)
        self.num_bytes = len(self._data)
        self.end: TraceEnd | None = None
        #: Of each chunk: its visits, and the first and last byte of each section.
        self._chunks: list[tuple[int, list[tuple[int, int]]]] = []
        try:
            self.header, first = self._read_header()
            self.visits = self._read_visits(first)
        except BaseException:
            self._data.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def layer(self, layer_id: int) -> LayerPages:
        """The selections of one of ``header.layers``, for all heads and visits.

        Raises:
            ConfigError: the layer is damaged.
        """
        at = 1 + self.header.layers.index(layer_id)
        parts = [
            self._decoded(partial(decode_layer, self._data[slice(*x[at])], count, self.header))
            for count, x in self._chunks
        ]
        lengths, pages = (np.concatenate(column) for column in zip(*parts, strict=True))
        limits = np.repeat(np.repeat(self.full_pages, self.header.heads), lengths.ravel())
        if (wrong := np.flatnonzero(pages >= limits)).size:
            page, limit = pages[wrong[0]], limits[wrong[0]]
            raise self._error(f"got page {page}, expected one of the request's {limit} full pages")
        return LayerPages(lengths, pages)

    @property
    def full_pages(self) -> np.ndarray:
        """``[V] int32``, complete pages of the context at each visit."""
        pages: np.ndarray = (self.visits.seq_lens - 1) // self.header.page_size
        return pages

    def selections(self, layer_id: int) -> Selections:
        """A layer's selections, one stream for each head and request.

        Raises:
            ConfigError: the layer is damaged.
        """
        lengths, pages = self.layer(layer_id)
        count, heads = lengths.shape
        order = np.argsort(self.visits.requests, kind="stable")
        new = np.flatnonzero(np.diff(self.visits.requests[order], prepend=-1))
        starts = np.cumsum(lengths.ravel(), dtype=np.int64) - lengths.ravel()
        rows = (order * heads + np.arange(heads)[:, None]).ravel()
        sizes = lengths.ravel()[rows].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        gathered = pages[np.repeat(starts[rows], sizes) + within]
        streams = np.concatenate([h * count + new for h in range(heads)] + [[heads * count]])
        return Selections(
            pages=gathered,
            offsets=offsets,
            streams=streams,
            full_pages=np.tile(self.full_pages[order], heads),
        )

    def _open(self, path: Path) -> mmap.mmap:
        try:
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            # An empty file cannot be mapped.
            reason = getattr(error, "strerror", None) or "it is empty"
        raise self._error(f"cannot be read: {reason}; expected a trace")

    def _read_header(self) -> tuple[TraceHeader, int]:
        if self._data[: len(MAGIC)] != MAGIC:
            raise self._error(f"got {self._data[: len(MAGIC)]!r} at its start, expected {MAGIC!r}")
        chunk = self._chunk(len(MAGIC))
        if chunk is None or chunk[0] != HEAD:
            got = "the end of the file" if chunk is None else repr(chunk[0])
            raise self._error(f"its header is damaged: got {got}, expected a chunk {HEAD!r}")
        text = self._decoded(lambda: chunk[1].decode())
        values = parse_object(text, f"{self._name}: header", '{"note": "...", ...}')
        header = from_options(TraceHeader, "trace", f"{self._name}: header", values)
        return header, len(MAGIC) + CHUNK.size + len(chunk[1])

    def _read_visits(self, at: int) -> Visits:
        found = []
        while at < len(self._data) and self.end is None:
            chunk = self._chunk(at)
            if chunk is None:
                break
            kind, content = chunk
            start = at + CHUNK.size
            at = start + len(content)
            if kind == DONE:
                text = self._decoded(content.decode)
                values = parse_object(text, f"{self._name}: end", '{"dropped_steps": 0, ...}')
                self.end = from_options(TraceEnd, "trace", f"{self._name}: end", values)
            elif kind == STEP:
                found.append(self._read_step(start, content))
            else:
                got = f"a chunk {kind!r} at byte {start - CHUNK.size}"
                raise self._error(f"got {got}, expected {STEP!r} or {DONE!r}")
        if self.end is not None and at != len(self._data):
            raise self._error(f"got {len(self._data) - at} bytes after its end, expected none")
        if not found:
            raise self._error("has no selections, expected those of one decode step or more")
        visits = Visits(*(np.concatenate(column) for column in zip(*found, strict=True)))
        if visits.seq_lens.max() > _MAX_TOKENS:
            raise self._error(
                f"got a context of {visits.seq_lens.max()} tokens, expected at most {_MAX_TOKENS}"
            )
        header, pages = self.header, int(visits.seq_lens.max()) // self.header.page_size
        rows = header.heads * max(len(header.layers), len(np.unique(visits.requests)))
        if rows * pages > _MAX_COUNTERS:
            raise self._error(
                f"a replay needs {rows * pages >> 27} GiB, got contexts of up to {pages} pages in "
                f"{rows} rows, expected at most {_MAX_COUNTERS >> 27} GiB"
            )
        return visits

    def _read_step(self, start: int, content: bytes) -> Visits:
        count, sections = self._decoded(lambda: split_sections(content, len(self.header.layers)))
        self._chunks.append((count, [(start + a, start + b) for a, b in sections]))
        return self._decoded(lambda: decode_visits(content[slice(*sections[0])], count))

    def _chunk(self, at: int) -> tuple[bytes, bytes] | None:
        """Kind and content of the chunk at a byte; None if the file ends within it."""
        start = at + CHUNK.size
        if start > len(self._data):
            return None
        kind, size, expected = CHUNK.unpack(self._data[at:start])
        if start + size > len(self._data):
            return None
        content = self._data[start : start + size]
        if (got := checksum(kind, content)) != expected:
            raise self._error(f"got checksum {got:x} at byte {at}, expected {expected:x}")
        return kind, content

    def _decoded(self, decode: Callable[[], R]) -> R:
        try:
            return decode()
        except ValueError as error:
            raise self._error(f"is damaged: {error}") from None

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(
            f'{self._name}: {problem}; to record a trace, set "trace": "FILE" in the configuration '
            "or run hisparse trace record"
        )
