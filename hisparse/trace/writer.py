"""Writes a trace on a separate thread, so that decode steps never wait for the disk."""

import logging
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import ConfigError, one_line
from hisparse.private_files import open_private
from hisparse.trace.format import (
    MAGIC,
    STEP,
    TraceEnd,
    TraceHeader,
    Visits,
    encode_about,
    encode_chunk,
    encode_steps,
    visits_that_fit,
)

logger = logging.getLogger("hisparse")

#: Steps that wait for the writer, and bytes of their pages; further steps are dropped. One step may
#: always wait.
_QUEUED_STEPS = 64
_QUEUED_BYTES = 256 << 20
#: Pages of a chunk, padding included. In addition to what waits, the writer holds the steps of one
#: chunk, or one step that takes several, and a few copies of a chunk.
_CHUNK_PAGES = 1 << 20
#: A process that is killed loses no more than this.
_FLUSH_S = 1.0
#: Room that the last chunk takes.
_END_BYTES = 256
_MOST_FILES = 10_000


class RecordedStep(NamedTuple):
    """One decode step of B requests.

    Attributes:
        slots: ``[B]``, request slots.
        seq_lens: ``[B]``, tokens.
        pages: ``[L, B, H, K] int32``, in host memory.
        ready: the copy of ``pages`` from the device; None: they are there.
    """

    slots: np.ndarray
    seq_lens: np.ndarray
    pages: Tensor
    ready: torch.cuda.Event | None = None


class TraceWriter:
    """A trace file and the thread that writes it.

    Args:
        path: the file. If it exists, a number is added: earlier runs and other ranks keep theirs.
        header: what the trace is of.
        max_bytes: of the file; recording stops there.

    Attributes:
        path: the file that was created.

    Raises:
        ConfigError: no file can be created.
    """

    def __init__(self, path: Path, header: TraceHeader, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.path, self._file = _create(path)
        self._num_bytes = 0
        self._write(MAGIC + encode_about(header))
        self._stopped: str | None = None
        # Steps that were refused or taken by `put`, and those that the thread has written.
        self._refused = self._taken = self._written = 0
        self._requests: dict[int, tuple[int, int]] = {}
        self._num_requests = 0
        step_pages = len(header.layers) * header.heads * header.max_pages
        self._chunk_visits = min(visits_that_fit(header), max(1, _CHUNK_PAGES // step_pages))
        # Steps that wait for the thread. A decode step only takes the lock.
        self._lock = threading.Lock()
        self._waiting: list[RecordedStep] = []
        self._waiting_bytes = 0
        self._closing = False
        self._wake, self._idle = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hisparse-trace", daemon=True)
        self._thread.start()

    def put(self, step: RecordedStep) -> bool:
        """Hand over a step; False if it was dropped: the writer is too slow, or has stopped."""
        with self._lock:
            count, num_bytes = len(self._waiting), self._waiting_bytes + step.pages.nbytes
            fits = count < _QUEUED_STEPS and num_bytes <= _QUEUED_BYTES
            if self._stopped is None and (fits or not count):
                self._waiting.append(step)
                self._waiting_bytes = num_bytes
                self._taken += 1
                # The thread also looks once a second.
                if 2 * count >= _QUEUED_STEPS or num_bytes >= 4 * _CHUNK_PAGES:
                    self._wake.set()
                return True
        self._refused += 1
        return False

    @property
    def dropped_steps(self) -> int:
        """Steps that the file lacks: refused, or taken before the writer stopped."""
        lost = 0 if self._stopped is None else self._taken - self._written
        return self._refused + lost

    def flush(self) -> None:
        """Write the steps that were handed over, and wait until the thread has done so."""
        taken = self._taken
        while self._thread.is_alive() and self._stopped is None and self._written < taken:
            self._idle.clear()
            self._wake.set()
            # With a time limit: the thread may end at any time.
            self._idle.wait(0.01)

    def close(self) -> None:
        """Write what waits, and the end of the file."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                self._wake.wait(_FLUSH_S)
                self._wake.clear()
                closing = self._closing
                while steps := self._take(closing=closing):
                    self._write_steps(steps)
                self._idle.set()
            end = TraceEnd(dropped_steps=self.dropped_steps, reason=self._stopped or "closed")
            self._write(encode_about(end))
        except Exception as error:
            # The disk or memory is full, or the device failed, which the forward reports.
            self._stop(f"the trace cannot be written: {one_line(error)}")
        finally:
            with self._lock:
                self._stopped = self._stopped or "closed"
                self._waiting.clear()
            self._file.close()

    def _take(self, *, closing: bool) -> list[RecordedStep]:
        """The oldest steps that wait: as many as fit a chunk, or one that does not.

        Args:
            closing: refuse steps from now on if none waits.
        """
        with self._lock:
            count = visits = 0
            for step in self._waiting:
                visits += len(step.slots)
                if count and visits > self._chunk_visits:
                    break
                count += 1
            steps, self._waiting = self._waiting[:count], self._waiting[count:]
            self._waiting_bytes -= sum(step.pages.nbytes for step in steps)
            if closing and not steps:
                self._stopped = self._stopped or "closed"
        return steps

    def _write_steps(self, steps: list[RecordedStep]) -> None:
        """Write the steps of a chunk, or one step that takes several."""
        if self._stopped is not None:
            return
        for step in steps:
            if step.ready is not None:
                step.ready.synchronize()
        requests = [
            self._request(*at) for x in steps for at in zip(x.slots, x.seq_lens, strict=True)
        ]
        seq_lens = np.concatenate([x.seq_lens for x in steps])
        for first in range(0, len(requests), self._chunk_visits):
            part = slice(first, first + self._chunk_visits)
            visits = Visits(np.array(requests[part], np.int32), seq_lens[part])
            # Only a single step can have several parts.
            pages = np.concatenate([x.pages.numpy()[:, part] for x in steps], axis=1)
            chunk = encode_chunk(STEP, encode_steps(visits, pages))
            if self._num_bytes + len(chunk) + _END_BYTES > self._max_bytes:
                self._stop(f"the trace has reached max_bytes ({self._max_bytes})")
                return
            self._write(chunk)
        self._written += len(steps)

    def _request(self, slot: int, seq_len: int) -> int:
        """Number of the request in a slot: a new one unless its length grew by one."""
        number, length = self._requests.get(slot, (-1, -1))
        if length + 1 != seq_len:
            number, self._num_requests = self._num_requests, self._num_requests + 1
        self._requests[slot] = (number, seq_len)
        return number

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        logger.warning("hisparse: %s; recording into %r has stopped", reason, str(self.path))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self._num_bytes += len(data)


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """Create a file under the name or, where it is taken, under a numbered one."""
    for number in range(1, _MOST_FILES):
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            return name, open(name, "xb", opener=open_private)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"trace.path: cannot create {str(name)!r}: "
                f"{getattr(error, 'strerror', None) or error}; expected a file in a folder that "
                "exists"
            ) from None
    raise ConfigError(f"trace.path: got {str(path)!r}, taken {_MOST_FILES} times; expected another")
