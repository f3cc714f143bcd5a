"""Time implementations in turns, so that a slow phase of the host affects all of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from hisparse_bench.options import Options
from hisparse_bench.report import Case, Result


class Candidate(NamedTuple):
    """An implementation to time; both functions take the step's number.

    Attributes:
        run: runs one step.
        prepare: runs before each step and is not timed.
    """

    run: Callable[[int], Any]
    prepare: Callable[[int], Any] | None = None


#: Steps before the timed ones.
WARMUPS = 3
#: Steps in a turn.
_BLOCK = 8


def time_in_turns(
    candidates: Mapping[str, Candidate],
    num_steps: int,
    *,
    device: torch.device,
    num_warmups: int = WARMUPS,
) -> dict[str, list[float]]:
    """Time every step of every candidate.

    Each candidate runs each step once and in order, a block of steps at a turn. The first step of a
    block is not counted, because it starts with the processor caches that another candidate left.
    On a GPU the time is that between two events on the stream. The device sleeps before the first,
    until the host has queued the whole step: the host's own time is not in it.

    Args:
        candidates: name to candidate.
        num_steps: steps to time.
        device: device of the candidates.
        num_warmups: steps before the timed ones.

    Returns:
        Seconds of the counted steps, by name.
    """
    clock = _CudaClock() if device.type == "cuda" else _seconds_cpu
    times: dict[str, list[float]] = {impl: [] for impl in candidates}
    total = num_warmups + num_steps
    for first in range(0, total, _BLOCK):
        for impl, candidate in candidates.items():
            for step in range(first, min(first + _BLOCK, total)):
                if candidate.prepare is not None:
                    candidate.prepare(step)
                seconds = clock(candidate.run, step)
                if step >= num_warmups and step > first:
                    times[impl].append(seconds)
    return times


def kernel_times(candidate: Candidate, steps: Sequence[int]) -> dict[str, float]:
    """Median time of each kernel on a GPU, in us, times its launches in a step, by name.

    A kernel that begins while the one before it still runs (programmatic dependent launch) counts
    what it waits.
    """
    found = defaultdict[str, list[float]](list)
    for step in steps:
        if candidate.prepare is not None:
            candidate.prepare(step)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            candidate.run(step)
            torch.cuda.synchronize()
        for event in profile.events():
            if event.device_type.name == "CUDA":
                found[event.name].append(event.time_range.elapsed_us())
    return us_by_kernel(found, len(steps))


def us_by_kernel(found: Mapping[str, Sequence[float]], steps: int) -> dict[str, float]:
    """Us a step by the short name of a kernel, the longest first, from times by full name.

    Kernels of less than 1 us a step are left out.
    """
    times: defaultdict[str, float] = defaultdict(float)
    for name, each in found.items():
        short = name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("(")[0]
        # Full names tell apart kernels whose medians must not be mixed.
        times[short.strip()] += median(each) * len(each) / steps
    return {n: round(us, 2) for n, us in sorted(times.items(), key=lambda x: -x[1]) if us >= 1}


def timed_case(
    name: str,
    params: Mapping[str, Any],
    candidates: Mapping[str, Candidate],
    options: Options,
    *,
    agrees: Callable[[], bool],
    moved: Callable[[], int | Mapping[str, int]],
    num_warmups: int = WARMUPS,
) -> Case:
    """Time candidates in turns.

    Args:
        name: name of the case.
        params: sizes and other parameters.
        candidates: name to candidate.
        options: device and number of steps.
        agrees: says, after the timed steps, whether results are correct.
        moved: says, after the timed steps, the bytes of a step: of all, or by name of a candidate.
        num_warmups: steps before the timed ones.
    """
    times = time_in_turns(
        candidates, options.num_steps, device=options.device, num_warmups=num_warmups
    )
    num_bytes = moved()  # Before the check, which may run steps.
    of_impl = dict.fromkeys(times, num_bytes) if isinstance(num_bytes, int) else num_bytes
    return Case(
        name=name,
        params={**params, "bytes": num_bytes, "threads": torch.get_num_threads()},
        gate="passed" if agrees() else "failed",
        results=[Result.of(impl, seconds, of_impl[impl]) for impl, seconds in times.items()],
    )


def _seconds_cpu(run: Callable[[int], Any], step: int) -> float:
    start = time.perf_counter()
    run(step)
    return time.perf_counter() - start


class _CudaClock:
    """Times steps on the current stream; the device waits for the host, never during a step."""

    #: Cycles of the device, at first about 1 ms, at last about 70 ms.
    _FIRST, _MOST = 2_000_000, 128_000_000

    def __init__(self) -> None:
        self._cycles = self._FIRST

    def __call__(self, run: Callable[[int], Any], step: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(self._cycles)
        begin.record()
        run(step)
        end.record()
        if begin.query():
            # The device woke before the host was done. Steps before the timed ones find the time.
            self._cycles = min(2 * self._cycles, self._MOST)
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
