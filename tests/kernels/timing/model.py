"""The time of a launch on an H100, from its machine code, its grid and the bytes that it moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from hisparse.plan.estimate import GPUS
from tests.kernels.sass import blocks_per_sm
from tests.kernels.timing.costs import unit_cycles
from tests.kernels.timing.machine import BlockRun, Machine
from tests.kernels.timing.recorded import ARCH, Recorded

__all__ = ["CLOCK", "Timed", "timed"]

#: Of an H100 SXM; GHz are those that its multiprocessors boost to.
_PROCESSORS, _SCHEDULERS, CLOCK, _H100 = 132, 4, 1.755, GPUS["h100"]
#: Instructions of warps that are run for a launch, about; of a block at least.
_INSTRUCTIONS = 200_000


class Timed(NamedTuple):
    """A launch, and the times that bound it, in us. The largest one is its time.

    Attributes:
        kernel: its name in the source.
        grid, threads: blocks, and threads of each.
        registers, spills: of a thread; the latter in bytes.
        shared: bytes of a block.
        resident: blocks that a multiprocessor holds at once.
        waves: turns in which the fullest multiprocessor runs its blocks.
        issue: in which schedulers start the instructions, or a unit takes them.
        wave: of the slowest block, alone; or of all blocks of a multiprocessor, as many at once as
            it holds.
        hbm, link: in which bytes of device memory and of host memory move.
        instructions: that the warps of all blocks start.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    registers: int
    spills: int
    shared: int
    resident: int
    waves: int
    issue: float
    wave: float
    hbm: float
    link: float
    instructions: int

    @property
    def us(self) -> float:
        """The time, without the gap before the next launch."""
        return max(self.issue, self.wave, self.hbm, self.link)


def timed(recorded: Recorded) -> Timed:
    """Run some blocks of a launch, and time all of them."""
    launch, code, memory = recorded
    machine = Machine(code.program(), launch, memory)
    first, each = machine.run((0, 0, 0)), launch.cluster
    grid = (launch.grid[0] // each, *launch.grid[1:])
    shares = _samples(grid, max(1, _INSTRUCTIONS // int(first.issues.sum())))
    runs = {(x, y, z): machine.run((x * each, y, z)) if x + y + z else first for x, y, z in shares}

    def mean(of: Callable[[BlockRun], float]) -> float:
        return sum(share * of(runs[block]) for block, share in shares.items())

    clusters, warps = math.prod(grid), launch.threads // 32
    shared = code.shared + launch.shared
    resident = blocks_per_sm(ARCH, code.registers, warps, shared)
    busiest = -(-clusters * each // _PROCESSORS)
    # Blocks share caches, so bytes of device memory are what the blocks ask for at most.
    hbm = clusters * mean(lambda run: run.num_bytes(False))
    link = clusters * mean(lambda run: run.num_bytes(True))
    slowest = max(run.cycles for run in runs.values())
    return Timed(
        kernel=launch.kernel,
        grid=launch.grid,
        threads=launch.threads,
        registers=code.registers,
        spills=code.spills,
        shared=shared,
        resident=resident,
        waves=-(-busiest // resident),
        issue=busiest * mean(lambda run: _issue_cycles(machine, run)) / (1000 * CLOCK * each),
        wave=max(slowest, busiest * mean(lambda run: run.cycles) / resident) / (1000 * CLOCK),
        hbm=hbm / (1000 * _H100.hbm),
        link=link / (1000 * _H100.read),
        instructions=round(clusters * mean(lambda run: run.issues.sum())),
    )


def _samples(grid: tuple[int, int, int], most: int) -> dict[tuple[int, int, int], float]:
    """About ``most`` blocks (or clusters) to run, and the share of all that each stands for.

    Blocks of a row do the same, and evenly spread ones are taken. The first row of more may do
    something else than the others (or is splits that merge).
    """
    x, y, z = grid
    count, rows = x * y * z, y * z
    if rows == 1:
        parts = [({n * (count - 1) // max(1, most - 1) for n in range(most)}, 1.0)]
    else:
        first = set(range(x)) if z > 1 and x <= most else {0}
        parts = [(first, 1 / rows), ({count // 2, count - 1}, 1 - 1 / rows)]
    return {
        (n % x, n // x % y, n // x // y): share / len(numbers)
        for numbers, share in parts
        for n in sorted(numbers)
    }


def _issue_cycles(machine: Machine, run: BlockRun) -> float:
    """Cycles in which each of four schedulers starts its share of a block's instructions."""
    busy: Counter[str] = Counter()
    for each, count in zip(machine.code, run.issues.tolist(), strict=True):
        if count:
            unit, cycles = unit_cycles(each)
            busy[unit] += count * cycles
            busy["issue"] += count * (unit != "issue")
    return max(busy.values()) / _SCHEDULERS
