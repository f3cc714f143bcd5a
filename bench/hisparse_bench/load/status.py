"""Says what a load benchmark does, and about how long the rest takes."""

from __future__ import annotations

import time

from rich.progress import Progress

__all__ = ["Status"]


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
        self._since = time.monotonic()
        self._task = progress.add_task("reading the model", total=None)

    def expect(self, servers: int) -> None:
        """Set how many servers the run starts; time counts from here."""
        self._servers, self._since = servers, time.monotonic()

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
        """What the rest of the run takes if its servers take as long as those before."""
        done = self._started - 1
        if not done:
            return ""
        seconds = (time.monotonic() - self._since) / done * (self._servers - done)
        return f", about {seconds / 60:.0f} min left of this run"
