"""Processes on one store, and faults at random: no page that was acknowledged is lost in silence.

A round is some processes at work at once, a fault or two meanwhile, and a fault after they have
ended. Then one process opens the store and reads every page. A failure prints the seed of its store
and what was done to it; how the processes interleave differs from run to run.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hisparse.errors import HiSparseError
from hisparse.storage import FileStore, evict, report
from hisparse.storage.pages import PageFolder
from tests.processes import largest_file
from tests.sizes import FAULTS
from tests.storage.pages import DISK_BYTES, NAMESPACE, contents, key_of, page_files, read

#: Rounds of one store.
_ROUNDS = 10 if FAULTS else 5
#: Ends of files on a disk that is full.
_FULL = (0, 7, 4096, NAMESPACE.page_bytes)
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
    """Tell the log, and of each page that leaves, before it does."""
    logging.getLogger("hisparse").addHandler(Told(tell))
    report._QUIET_S, evict.LOW_WATER = 0.0, 0.6  # type: ignore[misc]
    remove = PageFolder.remove

    def told(self: PageFolder, key: str) -> int:
        tell("left", key)
        return remove(self, key)

    PageFolder.remove = told  # type: ignore[method-assign]


def _at_work(
    path: Path, rng: random.Random, first: int, limit: int | None
) -> Callable[[Tell], None]:
    """What a process does: its pages have the numbers from ``first`` on."""

    def work(tell: Tell) -> None:
        store, mine = FileStore(path, limit), []

        def put(count: int) -> None:
            for _ in range(count):
                mine.append(key_of(first + len(mine)))
                if store.put(NAMESPACE, mine[-1], contents(mine[-1])):
                    tell("put", mine[-1])

        for _ in range(rng.randrange(3, 12)):
            action = rng.choice(["put", "put", "read", "flush", "remove", "full", "open"])
            with contextlib.suppress(HiSparseError):
                if action == "put":
                    put(rng.randrange(1, 9))
                elif action == "read":
                    with ThreadPoolExecutor(3) as pool:
                        wanted = [rng.sample(mine, min(len(mine), 12)) for _ in range(3)]
                        reads = [pool.submit(read, store, keys) for keys in wanted]
                        store.collect(rng.choice([None, 10 * DISK_BYTES]))
                        for each in reads:
                            each.result()
                elif action == "flush":
                    store.flush()
                elif action == "remove":
                    store.remove(NAMESPACE, rng.sample(mine, len(mine) // 3))
                elif action == "full":
                    with largest_file(rng.choice(_FULL)):
                        put(rng.randrange(1, 5))
                        store.collect()
                else:
                    store.close()
                    with largest_file(rng.choice([*_FULL, 1 << 40])):
                        store = FileStore(path, limit)
        store.close()

    return work


class Faults:
    """A store, what happened to it, and faults.

    Args:
        path: of the store.
        seed: of all that is random.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng, self.ledger = path, random.Random(seed), Ledger()
        self.done = [f"seed {seed}"]
        self.limit = self.rng.choice([None, 40 * DISK_BYTES])
        self._number = 0

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
        if rng.random() < 0.5:
            self._harm("")
        self._look()

    def _meanwhile(self, children: list[int]) -> None:
        """Faults while processes work."""
        for _ in range(self.rng.randrange(3)):
            time.sleep(self.rng.uniform(0, 0.04))
            if self.rng.random() < 0.5:
                os.kill(self.rng.choice(children), signal.SIGKILL)
                self.done.append("kill")
            else:
                self._harm("while open: ")

    def _harm(self, when: str) -> None:
        """Something happens to the files."""
        harm = self.rng.choice([self._cut, self._stray, self._lose_size, self._lose_name])
        self.done.append(f"{when}{harm.__name__}")
        # Processes make and delete files meanwhile.
        with contextlib.suppress(FileNotFoundError, IndexError):
            harm()

    def _cut(self) -> None:
        file = self.rng.choice(page_files(self.path))
        os.truncate(file, self.rng.randrange(NAMESPACE.page_bytes))

    def _stray(self) -> None:
        file = self.rng.choice(page_files(self.path))
        shutil.copy(file, file.parent / self.rng.choice(["1.new", f"copy of {file.name}"]))

    def _lose_size(self) -> None:
        (self.path / "hisparse.size").unlink()

    def _lose_name(self) -> None:
        (self.path / "pages" / NAMESPACE.key / "namespace.json").unlink()

    def _look(self) -> None:
        """Each page is found, or left, or its loss was said; also on a disk that is full."""
        ledger, keys = self.ledger, sorted(self.ledger.acknowledged)
        full = self.rng.choice([8, 1 << 40])

        def look(tell: Tell) -> None:
            with largest_file(full), FileStore(self.path) as store:
                for key, ok in zip(keys, read(store, keys), strict=True):
                    if ok:
                        tell("found", key)

        self.done.append(f"look, files of at most {full:,} bytes")
        ledger.found.clear()
        ledger.note(_run([look]))
        missing = ledger.acknowledged - ledger.found - ledger.left - ledger.said
        assert not missing, f"{len(missing)} pages are lost"


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
            print(*faults.done, *faults.ledger.lines[-40:], sep="\n")
            raise
        shutil.rmtree(faults.path)
