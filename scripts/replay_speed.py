"""Measure how many page accesses a second a replay of selections takes, on one core.

``python -m scripts.replay_speed OUT.json`` replays made-up selections through stack distances and
through each policy, in a buffer of twice the selection. No figure without the gate: results equal
those of the plain oracles (``impl="reference"``) on a trace of the smaller kind, of fewer steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hisparse.doctor import provenance
from hisparse.kernels import POLICIES, Selections, replay, stack_depths
from hisparse.trace import SelectionTrace
from hisparse.trace.synthetic import MadeUpTrace

__all__ = ["main"]

#: Selected pages, and pages of the context.
_SIZES = ((127, 1024), (2048, 65_536))
_PAGE = 16


def _selections(selected: int, pages: int, steps: int, folder: Path) -> Selections:
    made = MadeUpTrace(
        context=pages * _PAGE,
        budget=(selected + 1) * _PAGE,
        overlap=0.85,
        steps=steps,
        layers=1,
        page_size=_PAGE,
    )
    with SelectionTrace(made.write(folder / f"{selected}-{pages}-{steps}")) as trace:
        return trace.selections(0)[0]


def _runs(trace: Selections, selected: int) -> dict[str, Callable[..., torch.Tensor]]:
    """What is measured, by name; each takes ``impl``."""
    runs: dict[str, Callable[..., torch.Tensor]] = {
        "stack distances": lambda **impl: stack_depths(trace, trace.num_pages, **impl)
    }
    for policy in POLICIES:
        runs[policy] = lambda policy=policy, **impl: replay(trace, policy, [2 * selected], **impl)
    return runs


def _check(trace: Selections, selected: int) -> None:
    for name, run in _runs(trace, selected).items():
        if not torch.equal(run(), run(impl="reference")):
            raise SystemExit(f"{name} differs from its oracle: no figures")


def _seconds(run: Callable[[], torch.Tensor], repeats: int) -> list[float]:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def main(words: list[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        _check(_selections(*_SIZES[0], 16, Path(folder)), _SIZES[0][0])
        for selected, pages in _SIZES:
            trace = _selections(selected, pages, arguments.steps, Path(folder))
            accesses = len(trace.pages)
            for name, run in _runs(trace, selected).items():
                times = _seconds(run, arguments.repeats)
                rate = accesses / statistics.median(times)
                print(f"{selected} of {pages} pages, {name}: {rate / 1e6:.1f} million a second")
                found.append(
                    {
                        "replay": name,
                        "selected_pages": selected,
                        "pages": pages,
                        "accesses": accesses,
                        "accesses_per_second": rate,
                        "seconds": times,
                    }
                )
    result = {
        "command": "replay_speed",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "params": {"steps": arguments.steps, "repeats": arguments.repeats, "threads": 1},
        "gate": "passed",
        "results": found,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
