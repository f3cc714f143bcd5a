"""Measure what a change of hisparse costs decode steps that do not use it.

``python -m scripts.decode_cost OUT.json --before FOLDER`` runs the steps of ``hisparse bench
decode`` with the checkout in FOLDER and with this one, with the same random inputs, on one
core. Kernels that FOLDER needs are built at its first run. Each pair has two new processes, which
do the same turns in alternating order; a pair's time is the sum of its turns' medians. It exits
with 1 if outputs differ, or if the upper end of the ratio's 95% interval is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hisparse.doctor import provenance
from scripts.pairs import LIMIT, PAIRS, ratio_of_pairs

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parent.parent
_SIZES = ("context", "budget", "batch", "layers")


class _Worker:
    """The steps of one checkout."""

    def __init__(self, tree: Path, most_steps: int, sizes: dict[str, int], core: int) -> None:
        command = [sys.executable, str(_ROOT / "scripts/decode_turns.py")]
        self._process = subprocess.Popen(
            [*command, str(most_steps), json.dumps(sizes)],
            env=os.environ | {"PYTHONPATH": f"{tree}:{tree / 'bench'}", "OMP_NUM_THREADS": "1"},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.sched_setaffinity(self._process.pid, {core})
        self.gate = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("decode_cost: a worker ended; its message is above")
        return line

    def turn(self, steps: int) -> tuple[float, float]:
        """The median of the steps' seconds, and their checksum."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = json.loads(self._read())
        return statistics.median(answer["seconds"]), answer["checksum"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _measure(arguments: argparse.Namespace) -> tuple[list[tuple[float, float]], bool]:
    """Seconds of each pair, before and after, and whether all outputs are equal."""
    sizes = {name: getattr(arguments, name) for name in _SIZES}
    trees = arguments.before.resolve(), _ROOT
    most = (arguments.turns + 1) * arguments.steps
    core = max(os.sched_getaffinity(0))
    pairs, same = [], True
    for pair in range(arguments.pairs):
        # Where a process's memory lies makes it faster or slower for as long as it lives.
        workers = [_Worker(tree, most, sizes, core) for tree in trees]
        same &= all(worker.gate == "passed" for worker in workers)
        seconds = [0.0, 0.0]
        for turn in range(arguments.turns + 1):
            sums = {}
            # Slow drifts of the machine meet both.
            for at in (0, 1) if (turn + pair) % 4 in (0, 3) else (1, 0):
                time, sums[at] = workers[at].turn(arguments.steps)
                if turn:  # The first turn warms up.
                    seconds[at] += time
            same &= sums[0] == sums[1]
        pairs.append((seconds[0], seconds[1]))
        for worker in workers:
            worker.close()
    return pairs, same


def _commit(tree: Path) -> str:
    return subprocess.check_output(
        ["git", "-C", tree, "rev-parse", "--short=12", "HEAD"], text=True
    ).strip()


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, required=True, help="an older checkout")
    parser.add_argument("--pairs", type=int, choices=PAIRS, default=20)
    parser.add_argument("--turns", type=int, default=12, help="of a pair")
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args(words)
    pairs, same = _measure(arguments)
    ratio, interval = ratio_of_pairs(pairs)
    params: dict[str, Any] = {
        k: v for k, v in vars(arguments).items() if k not in ("out", "before")
    }
    result = {
        "command": "decode-cost",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "before": _commit(arguments.before),
        "params": params,
        "gate": "passed" if same else "failed",
        "ratio": ratio,
        "interval": interval,
        "pairs_ms": [[1000 * x for x in pair] for pair in pairs],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"ratio {ratio:.4f}, 95% interval {interval[0]:.4f} to {interval[1]:.4f}, limit {LIMIT}; "
        f"outputs {'equal' if same else 'differ'}"
    )
    return int(interval[1] > LIMIT or not same)


if __name__ == "__main__":
    raise SystemExit(main())
