"""Files of selections: a gzip of a header and the decode steps, each in a member of its own.

::

    {"format": "hisparse trace 4", ...}    a TraceHeader as a line of JSON
    V    the visits of a step              u32; a visit is one decode step of one request
         their request numbers and sequence lengths, ``[2, V]``, and the selections of L layers,
         ``[L, V, H, K]``: for each page its distance from the page before, padding counting as -1
    ...
    0    {"dropped_steps": 0, ...}         a TraceEnd; absent if the process was killed

Numbers are little-endian i32; in a step the lowest bytes of all come first, the highest last.
"""

import contextlib
import errno
import gzip
import json
import logging
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from io import BufferedIOBase, FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import ConfigError, one_line, quoted
from hisparse.options import from_options, parse_object
from hisparse.private_files import open_private
from hisparse.types import SelectionScope

logger = logging.getLogger("hisparse")

FORMAT: Final = "hisparse trace 4"
#: Steps that wait for the writer, and bytes of their pages; further steps are dropped. One step may
#: always wait.
_QUEUED_STEPS = 64
_QUEUED_BYTES = 256 << 20
#: Room that the last member takes.
_END_BYTES = 256
_MOST_FILES = 10_000
#: Longer lines and contexts are refused, and more numbers in a file: they lie in memory.
_MAX_LINE = 1 << 20
_MAX_TOKENS = 1 << 24
_MAX_NUMBERS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """Where the selections of a trace come from.

    Attributes:
        note: the user's text, such as the model.
        algorithm: the algorithm that selected.
        scope: selection scope.
        page_size: S, tokens.
        page_bytes: bytes of K and V of one page in one row and layer.
        heads: H.
        max_pages: K, the most pages of a selection.
        layers: the layers that select.
        attended_by: for each of ``layers``, how many layers attend its selection.
        settings: the configuration.
        version: of hisparse.
        started: date and time, UTC.
    """

    note: str
    algorithm: str
    scope: SelectionScope
    page_size: int
    page_bytes: int
    heads: int
    max_pages: int
    layers: tuple[int, ...]
    attended_by: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    started: str = ""

    def __post_init__(self) -> None:
        for name in ("page_size", "heads", "max_pages"):
            if not 0 < getattr(self, name) < 2**31:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 1 to 2**31 - 1")
        if self.page_bytes < 0:
            raise ValueError(f"page_bytes: got {self.page_bytes}, expected 0 or more")
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise ValueError(f"layers: got {quoted(self.layers)}, expected different numbers")
        if len(self.attended_by) != len(self.layers) or min(self.attended_by) < 1:
            got = quoted(self.attended_by)
            raise ValueError(f"attended_by: got {got}, expected 1 or more for each of layers")


@dataclass(frozen=True, kw_only=True)
class TraceEnd:
    """How a recording ended.

    Attributes:
        dropped_steps: decode steps that the file lacks.
        reason: "closed", or why the recording stopped before.
    """

    dropped_steps: int
    reason: str


class RecordedStep(NamedTuple):
    """One decode step of B requests.

    Attributes:
        slots: ``[B]``, request slots.
        seq_lens: ``[B]``, tokens.
        pages: ``[L, B, H, K] int32``, in host memory, padded with -1.
        ready: the copy of ``pages`` from the device; None: they are there.
    """

    slots: np.ndarray
    seq_lens: np.ndarray
    pages: Tensor
    ready: torch.cuda.Event | None = None


class TraceWriter:
    """A trace file, which a thread writes, so that decode steps never wait for the disk.

    Args:
        path: the file. If it exists, a number is added: earlier runs and other ranks keep theirs.
        header: what the trace is of.
        max_bytes: of the file; recording stops there.

    Attributes:
        path: the file that was created.
        dropped_steps: steps that the file lacks so far.

    Raises:
        ConfigError: no file can be created.
    """

    def __init__(self, path: Path, header: TraceHeader, max_bytes: int) -> None:
        self.path, self._file = _create(path)
        self._max_bytes, self.dropped_steps = max_bytes, 0
        self._stopped: str | None = None
        #: Number and length of the request in each slot.
        self._requests: dict[int, tuple[int, int]] = {}
        self._num_requests = 0
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._write(_line({"format": FORMAT} | asdict(header)))
        self._thread = ThreadPoolExecutor(1, "hisparse-trace")

    def put(self, step: RecordedStep) -> bool:
        """Hand over a step; False if it was dropped: the writer is too slow, or has stopped."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        most = min(_QUEUED_STEPS, _QUEUED_BYTES // max(1, step.pages.nbytes))
        if self._stopped is None and len(self._waiting) <= most:
            self._waiting.append(self._thread.submit(self._take, step))
            return True
        self._drop()
        return False

    def flush(self) -> None:
        """Wait until the steps that were handed over are written."""
        for step in list(self._waiting):
            step.result()

    def close(self) -> None:
        """Write what waits, and the end of the file."""
        self._thread.shutdown()
        if not self._file.closed:
            self._stopped = self._stopped or "closed"
            end = TraceEnd(dropped_steps=self.dropped_steps, reason=self._stopped)
            with contextlib.suppress(OSError):  # Then it ends like that of a killed process.
                self._write(struct.pack("<I", 0) + _line(asdict(end)))
            self._file.close()

    def _take(self, step: RecordedStep) -> None:
        if self._stopped is None:
            try:
                if step.ready is not None:
                    step.ready.synchronize()
                self._write(self._encode(step), room=_END_BYTES)
            except Exception as error:
                # The disk or memory is full, or the device failed, which the forward reports.
                self._stop(f"the trace cannot be written: {one_line(error)}")
                self._file.close()
        if self._stopped is not None:
            self._drop()

    def _encode(self, step: RecordedStep) -> bytes:
        requests = [self._request(*at) for at in zip(step.slots, step.seq_lens, strict=True)]
        gaps = np.diff(step.pages.numpy(), prepend=np.int32(-1))
        numbers = np.concatenate([requests, step.seq_lens, gaps.ravel()], dtype="<i4")
        planes = numbers.reshape(-1, 1).view(np.uint8).T
        return struct.pack("<I", len(requests)) + planes.tobytes()

    def _request(self, slot: int, seq_len: int) -> int:
        """Number of the request in a slot: a new one unless its length grew by one."""
        number, length = self._requests.get(slot, (-1, -1))
        if length + 1 != seq_len:
            number, self._num_requests = self._num_requests, self._num_requests + 1
        self._requests[slot] = (number, seq_len)
        return number

    def _write(self, data: bytes, *, room: int = 0) -> None:
        """Write a member, if it leaves room."""
        member = gzip.compress(data, 1, mtime=0)
        if room and self._file.tell() + len(member) + room > self._max_bytes:
            self._stop(f"the trace has reached max_bytes ({self._max_bytes})")
        elif self._file.write(member) < len(member):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        logger.warning("hisparse: %s; recording into %r has stopped", reason, str(self.path))

    def _drop(self) -> None:
        with self._lock:
            self.dropped_steps += 1


def _line(found: Mapping[str, Any]) -> bytes:
    return json.dumps(found).encode() + b"\n"


def _create(path: Path) -> tuple[Path, FileIO]:
    """Create a file under the name or, where it is taken, under a numbered one."""
    for number in range(1, _MOST_FILES):
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            return name, open(name, "xb", buffering=0, opener=open_private)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"trace.path: cannot create {str(name)!r}: "
                f"{getattr(error, 'strerror', None) or error}; expected a file in a folder that "
                "exists"
            ) from None
    raise ConfigError(f"trace.path: got {str(path)!r}, taken {_MOST_FILES} times; expected another")


class SelectionTrace:
    """A trace of selections, in memory.

    Attributes:
        header: what the trace is of.
        end: how the recording ended; None: the file ends early, because the process was killed.
        requests: ``[V] int32``, number of the request of each visit, counted from 0 within the
            file, in the order of time.
        seq_lens: ``[V] int32``, tokens of the request, the new one included.
        num_bytes: size of the file.

    Raises:
        ConfigError: the file cannot be read, is not a trace, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._name = repr(str(path))
        self.end: TraceEnd | None = None
        try:
            self.num_bytes = path.stat().st_size
            with gzip.open(path) as file:
                self.header = self._read_header(file)
                steps = list(self._read_steps(file))
        except (OSError, EOFError, zlib.error, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = getattr(error, "strerror", None) or one_line(error)
            raise self._error(f"cannot be read: {reason}; expected a trace") from None
        if not steps:
            raise self._error("has no selections, expected those of one decode step or more")
        self.requests, self.seq_lens = np.concatenate([visits for visits, _ in steps], axis=1)
        self._pages = [pages for _, pages in steps]

    def layer(self, layer_id: int) -> np.ndarray:
        """``[V, H, K] int32``, the selections of one of ``header.layers``, padded with -1."""
        at = self.header.layers.index(layer_id)
        return np.concatenate([pages[at] for pages in self._pages])

    @property
    def full_pages(self) -> np.ndarray:
        """``[V] int32``, complete pages of the context at each visit."""
        pages: np.ndarray = (self.seq_lens - 1) // self.header.page_size
        return pages

    def _read_header(self, file: BufferedIOBase) -> TraceHeader:
        values = self._read_object(file, "header", '{"format": "...", ...}')
        if values.pop("format", None) != FORMAT:
            raise self._error(f"got another format, expected {FORMAT!r}")
        return from_options(TraceHeader, "trace", f"{self._name}: header", values)

    def _read_object(self, file: BufferedIOBase, what: str, example: str) -> dict[str, Any]:
        text = file.readline(_MAX_LINE).decode()
        return parse_object(text, f"{self._name}: {what}", example)

    def _read_steps(self, file: BufferedIOBase) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The visits ``[2, V]`` of each step, and its selections ``[L, V, H, K]``."""
        header, total = self.header, 0
        shape = (len(header.layers), -1, header.heads, header.max_pages)
        each = 2 + len(header.layers) * header.heads * header.max_pages
        while len(word := _read(file, 4)) == 4:
            if not (count := int.from_bytes(word, "little")):
                try:
                    found = self._read_object(file, "end", '{"dropped_steps": 0, ...}')
                except EOFError:
                    return
                self.end = from_options(TraceEnd, "trace", f"{self._name}: end", found)
                return
            total += count * each
            if total > _MAX_NUMBERS:
                raise self._error(f"got {total} numbers, expected at most {_MAX_NUMBERS}")
            data = _read(file, 4 * count * each)
            if len(data) < 4 * count * each:
                return
            planes = np.frombuffer(data, np.uint8).reshape(4, -1)
            numbers = np.ascontiguousarray(planes.T).view("<i4").ravel()
            visits = numbers[: 2 * count].reshape(2, count)
            pages = numbers[2 * count :].reshape(shape).cumsum(-1, dtype=np.int32) - 1
            self._check(visits, pages)
            yield visits, pages

    def _check(self, visits: np.ndarray, pages: np.ndarray) -> None:
        requests, seq_lens = visits
        if requests.min() < 0 or seq_lens.min() < 1 or seq_lens.max() > _MAX_TOKENS:
            got = f"request {requests.min()} and contexts of {seq_lens.min()} to {seq_lens.max()}"
            expected = f"numbers from 0 and sequence lengths of 1 to {_MAX_TOKENS}"
            raise self._error(f"got {got} tokens, expected {expected}")
        last = pages.max(axis=(0, 2, 3)) - (seq_lens - 1) // self.header.page_size
        if pages.min() < -1 or last.max() >= 0:
            raise self._error("got a page that is none of the request's full pages")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(
            f'{self._name}: {problem}; to record a trace, set "trace": "FILE" in the configuration'
        )


def _read(file: BufferedIOBase, size: int) -> bytes:
    """Up to ``size`` bytes; fewer where the file ends, also within a member."""
    try:
        return file.read(size)
    except EOFError:
        return b""
