"""The time of a launch on an H100, from its machine code, its grid and the bytes that it moves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

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
    """A launch, the times that bound it, in us, and its own.

    Attributes:
        threads: of a block.
        registers, spills: of a thread; the latter in bytes.
        shared: bytes of a block.
        resident: blocks that a multiprocessor holds at once.
        issue: in which schedulers start the instructions, or their busiest unit takes them.
        pipe: in which loads, stores and shuffles pass the pipe that the schedulers share.
        wave: of the slowest block, alone; or of all blocks of a multiprocessor, as many at once as
            it holds.
        inside: of a multiprocessor whose warps wait for each other in the last three.
        hbm, link: in which bytes of device memory and of host memory move.
        us: the same where warps wait for these, too; without the gap before the next launch.
    """

    threads: int
    registers: int
    spills: int
    shared: int
    resident: int
    issue: float
    pipe: float
    wave: float
    inside: float
    hbm: float
    link: float
    us: float


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
    hbm = clusters * mean(lambda run: run.num_bytes(False)) / (1000 * _H100.hbm)
    link = clusters * mean(lambda run: run.num_bytes(True)) / (1000 * _H100.read)
    slowest = max(run.cycles for run in runs.values())
    us = busiest / (1000 * CLOCK)
    units: dict[str, float] = defaultdict(float)
    for block, share in shares.items():
        for unit, cycles in _busy_cycles(machine, runs[block]).items():
            units[unit] += us * share * cycles / (_SCHEDULERS * each)
    pipe = us * mean(lambda run: run.wavefronts) / each
    held = min(busiest, resident) * warps
    wave = max(slowest / (1000 * CLOCK), us * mean(lambda run: run.cycles) / resident)
    return Timed(
        threads=launch.threads,
        registers=code.registers,
        spills=code.spills,
        shared=shared,
        resident=resident,
        issue=max(units.values()),
        pipe=pipe,
        wave=wave,
        inside=_together(wave, held, units, pipe),
        hbm=hbm,
        link=link,
        us=_together(wave, held, units, pipe, hbm, link),
    )


def _together(wave: float, warps: int, units: Mapping[str, float], *shared: float) -> float:
    """The time of warps that queue for units of a scheduler, one of four, and for what all share.

    A warp that comes to a queue finds what the others would leave there if it were not (mean value
    analysis: Reiser and Lavenberg, 1980).
    """
    servers = np.array([_SCHEDULERS] * len(units) + [1] * len(shared))
    taken, queues = np.array([*units.values(), *shared]) / warps, np.zeros(len(servers))
    alone, total = max(0.0, wave - float(taken @ servers)), wave
    for present in range(1, warps + 1):
        spent = taken * (1 + queues)
        total = alone + float(spent @ servers)
        queues = present * spent / total
    return total


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


def _busy_cycles(machine: Machine, run: BlockRun) -> Mapping[str, float]:
    """Cycles in which a block's instructions take each unit of the schedulers."""
    busy: dict[str, float] = defaultdict(float)
    for each, count in zip(machine.code, run.issues.tolist(), strict=True):
        if count:
            unit, cycles = unit_cycles(each)
            busy[unit] += count * cycles
            busy["issue"] += count * (unit != "issue")
    return busy
