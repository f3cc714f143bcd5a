"""``hisparse bench busy``: a decode step while other processes keep cores busy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hisparse.errors import ConfigError
from hisparse_bench.decode import DecodeBench
from hisparse_bench.options import Options
from hisparse_bench.report import Case, Result
from hisparse_bench.timing import Candidate, time_in_turns

#: Turns of each setting, so that a slow phase of the host affects all.
_TURNS = 4
_WARMUPS = 3
#: Ends with its parent, even if that is killed.
_SPIN = "import os; print(flush=True); p = os.getppid()\nwhile os.getppid() == p: pass"


@contextmanager
def busy_cores(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep ``count`` processes spinning, which it yields; the system's scheduler places them."""
    line = [sys.executable, "-S", "-c", _SPIN]
    children = [subprocess.Popen(line, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # It spins from now on.
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


@dataclass(frozen=True, kw_only=True)
class BusyBench(DecodeBench):
    """The served path with all threads and busy cores, against a quiet machine.

    Nothing is pinned. ``quiet_1_thread`` is what a step takes without help: the ratio
    ``busy/quiet_1_thread`` says how much other processes cost at most.

    Attributes:
        processes: processes that spin.
    """

    processes: int = 1

    def run(self, options: Options) -> Case:
        """Time the three settings; the gate is that of ``hisparse bench decode``."""
        if options.device.type != "cpu":
            raise ConfigError(f"--device: got {options.device.type}, expected cpu")
        threads, num_steps = torch.get_num_threads(), -(-options.num_steps // _TURNS)
        # Threads, and processes that spin.
        settings = {
            "busy": (threads, self.processes),
            "quiet": (threads, 0),
            "quiet_1_thread": (1, 0),
        }
        work, gate = self.prepared(options, _TURNS * len(settings) * (num_steps + _WARMUPS))
        ours = Candidate(work.decode, work.prepare)
        times: dict[str, list[float]] = {name: [] for name in settings}
        try:
            for _ in range(_TURNS):
                for name, (count, processes) in settings.items():
                    torch.set_num_threads(count)
                    with busy_cores(processes):
                        times[name] += time_in_turns(
                            {name: ours}, num_steps, device=options.device, num_warmups=_WARMUPS
                        )[name]
        finally:
            torch.set_num_threads(threads)
        return Case(
            name="busy",
            params=self._params() | {"processes": self.processes},
            gate=gate,
            results=[Result.of(name, seconds) for name, seconds in times.items()],
        )
