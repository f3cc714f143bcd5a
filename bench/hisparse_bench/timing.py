"""Timing of implementations in turns, so that a machine that drifts hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Candidate", "time_in_turns"]


class Candidate(NamedTuple):
    """One implementation at work; both get the number of the step, so that inputs can rotate.

    Attributes:
        run: does one step.
        prepare: done before each step, and not timed.
    """

    run: Callable[[int], Any]
    prepare: Callable[[int], Any] | None = None


#: Steps of a turn.
_BLOCK = 8


def time_in_turns(
    candidates: Mapping[str, Candidate],
    num_steps: int,
    *,
    device: torch.device,
    num_warmups: int = 3,
) -> dict[str, list[float]]:
    """Seconds of every step of every candidate, the first ``num_warmups`` steps left out.

    Each candidate does each step once and in order, a block of steps at a turn, of which the first
    is not counted: it finds the caches as another implementation left them. On a GPU the time is
    that between two events on the stream, and the device is idle when a step begins.

    Args:
        candidates: implementation to what it does.
        num_steps: steps that are timed.
        device: where the candidates run.
        num_warmups: steps before them.
    """
    clock = _seconds_cuda if device.type == "cuda" else _seconds_cpu
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


def _seconds_cpu(run: Callable[[int], Any], step: int) -> float:
    start = time.perf_counter()
    run(step)
    return time.perf_counter() - start


def _seconds_cuda(run: Callable[[int], Any], step: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run(step)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
