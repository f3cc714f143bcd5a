"""Computes the times of a decode layer's kernels on an H100, and writes the files that hold them.

    .venv/bin/python -m tests.kernels.timing [OPERATION ...]

Needs nvcc and Triton, and no GPU. ``bounds.json`` is what the test compares with;
``hisparse/plan/kernel_costs.json`` is what ``hisparse plan`` reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

from hisparse.plan import kernel_costs
from hisparse.plan.kernel_costs import OF_CONTEXT
from tests.kernels.timing.calls import BUDGET, CONTEXT, MISSES, SPECS, Step
from tests.kernels.timing.model import Timed, timed
from tests.kernels.timing.recorded import recorded

BOUNDS = Path(__file__).with_name("bounds.json")
COSTS = Path(kernel_costs.__file__).with_name("kernel_costs.json")
BATCHES, SHORT = (1, 8, 32), 16384


def times(
    width: int, batch: int, context: int = CONTEXT, only: Collection[str] = ()
) -> dict[str, Timed]:
    """The kernels of a step by operation, for keys of ``width``; only some of them, if given."""
    step, found = Step(SPECS[width], batch, context), {}
    for name, call in step.calls():
        if only and name not in only:
            continue
        launches: list[Timed] = []
        with recorded(lambda each: launches.append(timed(each)), step.is_host):  # noqa: B023
            call()
        (found[name],) = launches
    return found


def bounds_of(found: dict[str, Timed]) -> dict[str, float]:
    """Times of the kernels in us."""
    return {name: round(each.us, 2) for name, each in found.items()}


def main() -> None:
    """Write both files, for the operations that are named or else for all, and print the times."""
    only = sys.argv[1:]
    bounds, costs = (
        json.loads(path.read_text()) if path.exists() else {} for path in (BOUNDS, COSTS)
    )
    costs = {
        "pages": [-(-n // 16) - 1 for n in (SHORT, CONTEXT)],
        "batches": [BATCHES[0], BATCHES[-1]],
        "attended": BUDGET // 16,
        "misses": MISSES,
        "us": json.loads(COSTS.read_text())["us"] if COSTS.exists() else {},
    }
    for width in map(str, SPECS):
        few = times(int(width), 1, SHORT, OF_CONTEXT & {*(only or OF_CONTEXT)} or {""})
        every = {batch: times(int(width), batch, only=only) for batch in BATCHES}
        for batch, found in every.items():
            of_batch = bounds.setdefault(width, {}).setdefault(str(batch), {})
            of_batch |= bounds_of(found)
            for name, each in found.items():
                print(f"{width:>3} {batch:2} {name:16}{described(each)}", flush=True)
        for name, one in every[BATCHES[0]].items():
            shapes = (few.get(name, one), one, every[BATCHES[-1]].get(name, one))
            computed = [each.inside for each in shapes]
            # More work never takes less time, but a sample of blocks may.
            rising = [round(max(computed[: n + 1]), 2) for n in range(3)]
            costs["us"].setdefault(name, {})[width] = rising
        BOUNDS.write_text(json.dumps(bounds, indent=1) + "\n")
        COSTS.write_text(json.dumps(costs, indent=1) + "\n")


def described(each: Timed) -> str:
    """Its time, what bounds it, and what it takes of a multiprocessor."""
    limits = "issue, pipe, wave, inside, HBM, link" + "".join(f"{us:8.1f}" for us in each[5:11])
    taken = f"{each.registers} registers, {each.shared} bytes, {each.resident} blocks"
    return f"{each.us:8.1f} us; {limits}; {taken} of {each.threads} threads"


if __name__ == "__main__":
    main()
