"""Time of a decode step by part: score, select, swap in, attend, rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final
from unittest.mock import patch

from hisparse.kernels.dispatch import implementation
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.timing import Candidate

#: What is measured; "rest" is the remainder of the step.
PARTS: Final = ("score", "select", "swap_in", "attention")


def time_parts(requests: RandomRequests, steps: Candidate, num_steps: int) -> dict[str, float]:
    """Microseconds of each part of a decode step on a CPU.

    Clocks are put around the parts for these steps only, which are separate from the timed ones:
    times reported elsewhere have no clock inside. A clock costs less than a microsecond, which
    "rest" contains.

    - "score": ``retrieve_topk`` of the algorithm without the kernel ``select``;
    - "select": the kernel ``select``;
    - "swap_in": ``swap_in`` of the cache manager: hits, victims, copies, page table;
    - "attention": ``attend`` of the adapter;
    - "rest": everything else: storing the new token, order, preparation of tensors;
    - "step": the whole, the sum of the parts.

    All are means over the middle half of the steps, ordered by their time, so that the parts sum
    to the step. Median parts do not sum to a median step.

    Args:
        requests: the requests that ``steps`` decodes.
        steps: runs one step.
        num_steps: steps to measure, at least 1.
    """
    found = []
    clocks = _Clocks()
    with clocks.around(requests):
        for step in range(num_steps):
            if steps.prepare is not None:
                steps.prepare(step)
            found.append(clocks.split(steps.run, step))
    found.sort(key=lambda parts: parts["step"])
    quarter = num_steps // 4
    middle = found[quarter : num_steps - quarter]
    return {part: 1e6 * sum(x[part] for x in middle) / len(middle) for part in middle[0]}


class _Clocks:
    """Measures the time within wrapped functions, each without those that it calls."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        # Seconds of the wrapped functions that each running function has called.
        self._inner = [0.0]

    def around(self, requests: RandomRequests) -> ExitStack:
        """Wrap the parts; the result, a context manager, takes the clocks away."""
        coordinator = requests.coordinator
        owners: dict[str, tuple[Any, str]] = {
            "score": (requests, "retrieve_topk"),
            "select": (implementation("auto", requests.device), "select"),
            "swap_in": (coordinator.manager, "swap_in"),
            "attention": (requests.adapter, "attend"),
        }
        stack = ExitStack()
        for part, (owner, name) in owners.items():
            wrapped = self._wrap(part, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, wrapped))
        return stack

    def _wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            result = function(*arguments, **options)
            seconds = time.perf_counter() - start
            self._seconds[part] += seconds - self._inner.pop()
            self._inner[-1] += seconds
            return result

        return timed

    def split(self, run: Callable[[int], Any], step: int) -> dict[str, float]:
        """Run one step: seconds by part."""
        self._seconds, self._inner = dict.fromkeys(PARTS, 0.0), [0.0]
        start = time.perf_counter()
        run(step)
        whole = time.perf_counter() - start
        return {**self._seconds, "rest": whole - self._inner[0], "step": whole}
