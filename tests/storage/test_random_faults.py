"""Processes on one store, and faults at random: no page that was acknowledged is lost in silence.

A round is some processes at work at once, a fault or two meanwhile, and a fault after they have
ended. Then one process opens the store and reads every page. Rounds of one store follow each other
until it is replaced by a new one. A failure prints the seed of its store and what was done to it;
how the processes interleave differs from run to run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import re
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hisparse.errors import HiSparseError
from hisparse.storage import FileStore, collect, report, segments
from hisparse.storage.index import Index
from hisparse.storage.namespace import BLOCK_BYTES, read_header
from tests.processes import largest_file
from tests.sizes import FAULTS
from tests.storage.pages import NAMESPACE, contents, key_of, read, segment_files

_RECORD = 3 * 4096
#: Rounds of one store.
_ROUNDS = 10 if FAULTS else 5
#: Ends of files on a disk that is full: less than an index, a part of one, a part of a segment.
_FULL = (0, 33 << 10, 60 << 10, 150 << 10)
Tell = Callable[[str, str], None]
_DROPPED = re.compile(r"page ([0-9a-f]{64}) is dropped")


@dataclass
class Ledger:
    """What processes said: pages that were acknowledged, that left, and whose loss was logged."""

    acknowledged: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    #: Pages that the last look found.
    found: set[str] = field(default_factory=set)
    #: Pages whose records were cut by the test.
    cut: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Take what processes wrote."""
        for line in text.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "log":
                self.lines.append(rest)
                self.said.update(_DROPPED.findall(rest))
            else:
                assert kind != "raised", rest
                {"put": self.acknowledged, "left": self.left, "found": self.found}[kind].add(rest)


class Told(logging.Handler):
    """Writes lines of the log to the test."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell("log", record.getMessage())


def _run(
    works: Sequence[Callable[[Tell], None]], meanwhile: Callable[[list[int]], None] | None = None
) -> str:
    """Run each work in a child, and ``meanwhile`` with their ids. Returns what they told."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    children = [_start(work, writing) for work in works]
    os.close(writing)
    try:
        if meanwhile:
            meanwhile(children)
        with open(reading) as told:
            return told.read()
    finally:
        for child in children:
            os.waitpid(child, 0)


@contextlib.contextmanager
def _stopped(children: Sequence[int]) -> Iterator[None]:
    """No child runs inside the context: what it has put is in its segment, or not begun."""
    for child in children:
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGCONT)


def _start(work: Callable[[Tell], None], pipe: int) -> int:
    """Run ``work`` in a child. Returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Threads of pytest do not matter to the child.
        child = os.fork()
    if child:
        return child

    def tell(kind: str, text: str) -> None:
        os.write(pipe, f"{kind} {text[:3000]}\n".encode())

    try:
        _tell_all(tell)
        work(tell)
    except BaseException:
        tell("raised", traceback.format_exc().replace("\n", " | "))
    finally:
        os._exit(0)


def _tell_all(tell: Tell) -> None:
    """Tell the log, and of each page that leaves, before it does. Two descriptors are kept."""
    logging.getLogger("hisparse").addHandler(Told(tell))
    segments._MAX_OPEN, report._QUIET_S, collect.LOW_WATER = 2, 0.0, 0.6  # type: ignore[misc]
    delete = Index._delete

    def told(self: Index, pages: Iterable[tuple[Any, ...]], *args: float) -> int:
        pages = list(pages)
        for _, key in pages:
            tell("left", key.hex())
        return delete(self, pages, *args)

    Index._delete = told  # type: ignore[method-assign]


def _at_work(
    path: Path, rng: random.Random, first: int, limit: int | None
) -> Callable[[Tell], None]:
    """What a process does: its pages have the numbers from ``first`` on."""

    def work(tell: Tell) -> None:
        store, mine = _open(path, limit), []

        def put(count: int) -> None:
            for _ in range(count):
                mine.append(key_of(first + len(mine)))
                if store.put(NAMESPACE, mine[-1], contents(mine[-1])):
                    tell("put", mine[-1])

        for _ in range(rng.randrange(3, 12)):
            action = rng.choice(
                ["put", "put", "read", "flush", "collect", "remove", "full", "open"]
            )
            with contextlib.suppress(HiSparseError):
                if action == "put":
                    put(rng.randrange(1, 9))
                elif action == "read":
                    with ThreadPoolExecutor(3) as pool:
                        wanted = [rng.sample(mine, min(len(mine), 12)) for _ in range(3)]
                        reads = [pool.submit(read, store, keys) for keys in wanted]
                        store.collect(rng.choice([0.5, 1.0]))
                        for each in reads:
                            each.result()
                elif action == "flush":
                    store.flush()
                elif action == "collect":
                    store.collect(rng.choice([0.5, 1.0]))
                elif action == "remove":
                    store.remove(NAMESPACE, rng.sample(mine, len(mine) // 3))
                elif action == "full":
                    with largest_file(rng.choice(_FULL)):
                        put(rng.randrange(1, 5))
                        store.collect(1.0)
                else:
                    store.close()
                    with largest_file(rng.choice([*_FULL, 1 << 40])):
                        store = _open(path, limit)
        store.close()

    return work


def _open(path: Path, limit: int | None = None) -> FileStore:
    return FileStore(path, limit, segment_bytes=4 * _RECORD)


class Faults:
    """A store, what happened to it, and faults.

    Args:
        path: of the store.
        seed: of all that is random.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng, self.ledger = path, random.Random(seed), Ledger()
        self.done = [f"seed {seed}"]
        #: An index that was lost knows no page whose record is cut, so that nobody can say it.
        self.cuts = seed % 3 == 0
        self.limit = self.rng.choice([None, 40 * _RECORD])
        self._index = path / "index.sqlite"
        self._backups = path.parent / f"{path.name}.backups"
        self._backups.mkdir()
        self._number, self._children = 0, list[int]()

    def round(self) -> None:
        """Processes work, something fails, and every page is looked for."""
        rng = self.rng
        works = []
        for _ in range(rng.randrange(1, 4)):
            self._number += 1
            seed = random.Random(rng.randrange(1 << 30))
            works.append(_at_work(self.path, seed, 1000 * self._number, self.limit))
        self.done.append(f"{len(works)} processes")
        self.ledger.note(_run(works, self._meanwhile))
        self._children = []
        if rng.random() < 0.5:
            self._harm("")
        self._look()

    def _meanwhile(self, children: list[int]) -> None:
        """Faults while processes work."""
        self._children = children
        for _ in range(self.rng.randrange(3)):
            time.sleep(self.rng.uniform(0, 0.04))
            if self.rng.random() < 0.5:
                os.kill(self.rng.choice(children), signal.SIGKILL)
                self.done.append("kill")
            else:
                self._harm("while open: ")

    def _harm(self, when: str) -> None:
        """Something happens to the files."""
        kinds = [self._cut] if self.cuts else [self._lose, self._restore]
        harm = self.rng.choice([*kinds, self._back_up, self._stray, self._rename])
        self.done.append(f"{when}{harm.__name__}")
        # Processes make and delete files meanwhile.
        with contextlib.suppress(FileNotFoundError, IndexError):
            harm()

    def _lose(self) -> None:
        for suffix in self.rng.choice([("",), ("", "-wal", "-shm")]):
            Path(f"{self._index}{suffix}").unlink(missing_ok=True)

    def _back_up(self) -> None:
        shutil.copy(self._index, self._backups / f"{len(self.done)}")

    def _restore(self) -> None:
        if old := sorted(self._backups.iterdir()):
            restored = shutil.copy(self.rng.choice(old), self.path / "restored")
            # As mv puts another file in its place, or as cp overwrites the one that is there. Of a
            # file that SQLite has open that destroys it unnoticed, as docs/storage.md says.
            ways = [os.replace] if self._children else [os.replace, shutil.copy]
            self.rng.choice(ways)(restored, self._index)
            for suffix in self.rng.choice([(), ("-wal", "-shm")]):
                Path(f"{self._index}{suffix}").unlink(missing_ok=True)

    def _stray(self) -> None:
        file = self._segment()
        shutil.copy(file, file.parent / self.rng.choice(["1.seg", "copy of a segment"]))

    def _segment(self) -> Path:
        return self.rng.choice([x for x in segment_files(self.path) if x.name != "1.seg"])

    def _rename(self) -> None:
        file = self._segment()
        file.rename(file.with_name(f"{time.time_ns():016x}.seg"))

    def _cut(self) -> None:
        file = self._segment()
        with _stopped(self._children):
            self._cut_at_random(file)

    def _cut_at_random(self, file: Path) -> None:
        data = file.read_bytes()
        size = self.rng.randrange(len(data) + 1)
        for at in range(0, len(data), BLOCK_BYTES):
            header = read_header(data[at : at + BLOCK_BYTES])
            if header and at + header.num_bytes > size:
                self.ledger.cut.add(header.key.hex())
        os.truncate(file, size)

    def _look(self) -> None:
        """Each page is found, or left, or its loss was said; also on a disk that is full."""
        ledger, keys = self.ledger, sorted(self.ledger.acknowledged)
        full = self.rng.choice([0, 60 << 10, 1 << 40, 1 << 40])

        def look(tell: Tell) -> None:
            with largest_file(full):
                store = _open(self.path)
                for key, ok in zip(keys, read(store, keys), strict=True):
                    if ok:
                        tell("found", key)
                with contextlib.suppress(HiSparseError):  # Which pages were used is not written.
                    store.close()

        self.done.append(f"look, files of at most {full:,} bytes")
        ledger.found.clear()
        ledger.note(_run([look]))
        missing = ledger.acknowledged - ledger.found - ledger.left
        assert missing <= ledger.cut, f"{len(missing - ledger.cut)} pages are lost"
        counts = [re.search(r"(\d+) pages are dropped from the index", x) for x in ledger.lines]
        said = sum(int(x[1]) for x in counts if x)
        assert len(missing - ledger.said) <= said, "a loss is not said"


def test_faults_at_random(tmp_path: Path) -> None:
    """Of 500 rounds in ``make test-all PART=faults``."""
    stores = 50 if FAULTS else 1
    first = int(os.environ.get("SEED", 0))
    for seed in range(first, first + stores):
        faults = Faults(tmp_path / f"{seed}", seed)
        try:
            for _ in range(_ROUNDS):
                faults.round()
        except BaseException:
            lines = [x for x in faults.ledger.lines if "is ignored" not in x]
            print(*faults.done, *lines[-40:], sep="\n")
            raise
        shutil.rmtree(faults.path)
