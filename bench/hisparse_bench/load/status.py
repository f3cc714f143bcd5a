"""Says what a load benchmark does, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.progress import Progress


class Status:
    """The state of one run: a bar on a terminal, elsewhere a line for each change.

    Args:
        progress: shows the bar.
        run: which run of how many, such as "run 2 of 4"; empty for a single one.
    """

    def __init__(self, progress: Progress, run: str = "") -> None:
        self._progress = progress
        self._run = run
        self._servers = self._started = 0
        #: Work of each kind that is left; what was done, and the seconds that it took.
        self._work: dict[str, float] = {}
        self._done: dict[str, tuple[float, float]] = {}
        self._task = progress.add_task("reading the model", total=None)

    def expect(self, servers: int, work: Mapping[str, float]) -> None:
        """Set how many servers the run starts, and how much work of each kind it is."""
        self._servers, self._work = servers, dict(work)

    @contextmanager
    def work(self, kind: str, amount: float) -> Iterator[None]:
        """Time a part of the work, in the unit of :meth:`expect`."""
        began = time.monotonic()
        try:
            yield
        finally:
            done, seconds = self._done.get(kind, (0.0, 0.0))
            self._done[kind] = done + amount, seconds + time.monotonic() - began
            self._work[kind] = max(0.0, self._work.get(kind, 0.0) - amount)

    def start_server(self, name: str) -> None:
        """Say that the next server starts."""
        self._started += 1
        self.say(f"starting the server of {name}{self._left()}")

    def say(self, text: str, total: int | None = None) -> None:
        """Say what happens; ``total``: how often :meth:`advance` is called."""
        where = f"server {self._started} of {self._servers}" if self._started else ""
        text = ": ".join(filter(None, (", ".join(filter(None, (self._run, where))), text)))
        self._progress.reset(self._task, description=text, total=total)
        if not self._progress.console.is_terminal:
            self.show(text)

    def show(self, text: str) -> None:
        """Print a line that stays."""
        clock = time.strftime("%H:%M:%S")
        self._progress.console.print(
            f"{clock} {text}", highlight=False, markup=False, soft_wrap=True
        )

    def advance(self) -> None:
        """One of the total is done."""
        self._progress.advance(self._task)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.remove_task(self._task)

    def _left(self) -> str:
        """What the rest of the run takes, if work takes as long as that of its kind before."""
        if not self._done:
            return ""
        left = {kind: amount for kind, amount in self._work.items() if amount}
        known = left.keys() & self._done.keys()
        seconds = sum(left[kind] * self._done[kind][1] / self._done[kind][0] for kind in known)
        about = "about" if len(known) == len(left) else "more than"
        return f", {about} {seconds / 60:.0f} min left of this run"
